"""A model's folder is whole or absent."""

import json
import shutil

import pytest

from oasiskv.errors import ModelError
from oasiskv.models.cache import ensure_folder, is_ready, models_root


def build_one(folder, scratch):
    (folder / "config.json").write_text("{}")
    (folder / "weights").write_bytes(b"w" * 100)
    (scratch / "download").write_text("thrown away")


def never(folder, scratch):
    pytest.fail("the folder was ready, yet it was built")


def ensure(build, recipe=1, need_bytes=0):
    return ensure_folder("tiny", recipe, build, need_bytes=need_bytes, on_wait=lambda: None)


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_a_model_is_built_once_and_nothing_else_is_left(home):
    folder = ensure(build_one)
    assert folder == home / "tiny"
    assert names(folder) == ["config.json", "oasiskv.json", "weights"]
    assert names(home) == [".lock", "tiny"]
    assert ensure(never) == folder


def test_a_failed_build_leaves_nothing(home):
    def fail(folder, scratch):
        build_one(folder, scratch)
        raise ModelError("no network")

    with pytest.raises(ModelError, match="no network"):
        ensure(fail)
    assert names(home) == [".lock"]


def test_a_higher_recipe_builds_again(home):
    def build_two(folder, scratch):
        (folder / "config.json").write_text('{"second": true}')

    ensure(build_one, recipe=1)
    folder = ensure(build_two, recipe=2)
    assert names(folder) == ["config.json", "oasiskv.json"]
    assert names(home) == [".lock", "tiny"]


@pytest.mark.parametrize("damage", ["shorter", "gone", "manifest", "foreign"])
def test_a_damaged_folder_is_not_ready_and_is_built_again(home, damage):
    folder = ensure(build_one)
    if damage == "shorter":
        (folder / "weights").write_bytes(b"w" * 99)
    elif damage == "gone":
        (folder / "weights").unlink()
    elif damage == "manifest":
        (folder / "oasiskv.json").write_text('{"recipe"')
    else:
        (folder / "oasiskv.json").write_text("[]")
    assert not is_ready(folder, 1)
    assert is_ready(ensure(build_one), 1)


def test_too_little_room_is_said_before_building(home):
    need = shutil.disk_usage("/").total * 1000
    with pytest.raises(ModelError, match=r"free.*OASISKV_HOME") as caught:
        ensure(never, need_bytes=need)
    assert f"{need / 1e6:,.0f} MB" in str(caught.value)


def test_a_cache_that_cannot_be_a_folder_names_the_setting(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OASISKV_HOME", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="OASISKV_HOME"):
        ensure(never)


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OASISKV_HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert models_root() == tmp_path / ".cache" / "oasiskv" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert models_root() == tmp_path / "xdg" / "oasiskv" / "models"
    monkeypatch.setenv("OASISKV_HOME", "~/here")
    assert models_root() == tmp_path / "here" / "models"


def test_the_manifest_lists_every_file(home):
    manifest = json.loads((ensure(build_one) / "oasiskv.json").read_text())
    assert manifest == {"recipe": 1, "files": {"config.json": 2, "weights": 100}}
