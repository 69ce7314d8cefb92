"""What `oasiskv models` prints."""

import pytest
from typer.testing import CliRunner

from oasiskv.errors import ModelError
from oasiskv.models import cli
from oasiskv.models.cache import ensure_folder


def invoke(*arguments):
    return CliRunner().invoke(cli.app, arguments, catch_exceptions=False)


def put_in_cache(folder, scratch):
    (folder / "config.json").write_text("{}")


def test_the_list_says_what_is_there_and_what_is_fetched(home):
    ensure_folder("smollm2-135m", 1, put_in_cache, need_bytes=0, on_wait=lambda: None)
    result = invoke()
    assert result.exit_code == 0
    header, base, longer = result.stdout.splitlines()
    assert header.split() == ["NAME", "CONTEXT", "SIZE", "LICENCE", "FETCHED", "FOLDER"]
    assert base.split() == [
        *("smollm2-135m", "8,192", "tokens", "273", "MB", "Apache-2.0", "yes"),
        str(home / "smollm2-135m"),
    ]
    assert longer.split()[:3] == ["smollm2-135m-32k", "32,768", "tokens"]
    assert longer.split()[-2:] == ["no", str(home / "smollm2-135m-32k")]


def test_fetch_prints_the_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(cli, "fetch_model", lambda name: tmp_path / name)
    result = invoke("fetch", "smollm2-135m")
    assert result.stdout == f"{tmp_path / 'smollm2-135m'}\n"


def test_fetching_an_unknown_model_is_an_error(home):
    with pytest.raises(ModelError, match="no built-in model is called 'nothing'"):
        invoke("fetch", "nothing")
