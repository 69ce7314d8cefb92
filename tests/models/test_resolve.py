"""Names, folders and hub ids are told apart; anything else is one clear error."""

import importlib.util

import pytest

from oasiskv.errors import ModelError
from oasiskv.models import resolve
from oasiskv.models.prepare import fetch_model
from oasiskv.models.resolve import resolve_model


def test_a_built_in_name_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setattr(resolve, "fetch_model", lambda name: tmp_path / name)
    assert resolve_model("smollm2-135m-32k") == tmp_path / "smollm2-135m-32k"


def test_a_folder_with_a_config_is_itself(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_an_existing_folder_goes_before_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "name" / "config.json").write_text("{}")
    assert resolve_model("org/name").is_dir()


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"no config\.json"):
        resolve_model(str(tmp_path))


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a file"):
        resolve_model(str(tmp_path / "model.gguf"))


@pytest.mark.parametrize("hub_id", ["org/name", "HuggingFaceTB/SmolLM2-135M-Instruct", "a.b/c_d.1"])
def test_a_hub_id_is_passed_through(hub_id, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_model(hub_id) == hub_id


@pytest.mark.parametrize(
    "wrong", ["", "smollm", "/no/such/folder", "./no/folder", "../x", "a/b/c", "org/", "o r/g"]
)
def test_anything_else_lists_the_built_ins(wrong, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="smollm2-135m, smollm2-135m-32k"):
        resolve_model(wrong)


def test_fetching_an_unknown_name_lists_the_built_ins():
    with pytest.raises(ModelError, match=r"'gpt'.*smollm2-135m, smollm2-135m-32k"):
        fetch_model("gpt")


@pytest.mark.parametrize("name", ["smollm2-135m", "smollm2-135m-32k"])
def test_a_missing_extra_is_named_before_anything_is_downloaded(home, monkeypatch, name):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda module: None if module == "gguf" else real(module)
    )
    with pytest.raises(ModelError, match=r"needs gguf: pip install 'oasiskv\[models\]'"):
        fetch_model(name)
    assert not home.exists()
