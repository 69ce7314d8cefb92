"""The folder that keeps converted models: whole models only, whatever interrupts their making.

A model is made in a work folder and renamed into place, so a folder with a model's name is always
a finished one. Only the holder of the lock makes work folders, and the system drops the lock when
a process dies: whoever gets the lock may therefore sweep every work folder it finds.
"""

import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from oasiskv.errors import ModelError

HOME_VARIABLE = "OASISKV_HOME"
MANIFEST = "oasiskv.json"
WORK_PREFIX = ".work-"

Build = Callable[[Path, Path], None]
"""``build(folder, scratch)`` fills the empty ``folder``; ``scratch`` is thrown away afterwards."""


def models_root() -> Path:
    """Folder that holds one folder per model: ``$OASISKV_HOME/models``, by default in the
    user's cache folder (``$XDG_CACHE_HOME`` or ``~/.cache``)."""
    home = os.environ.get(HOME_VARIABLE)
    if home:
        return Path(home).expanduser().absolute() / "models"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache").absolute() / "oasiskv" / "models"


def is_ready(folder: Path, recipe: int) -> bool:
    """Whether ``folder`` holds a whole model made by conversion number ``recipe``.

    Every file must have the size it was written with, so that a disk that lost data at a power
    cut is noticed too.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        sizes = manifest["files"]
        return bool(manifest["recipe"] == recipe) and all(
            (folder / name).stat().st_size == size for name, size in sizes.items()
        )
    except (FileNotFoundError, NotADirectoryError, json.JSONDecodeError, KeyError, TypeError):
        return False


def ensure_folder(
    name: str, recipe: int, build: Build, *, need_bytes: int, on_wait: Callable[[], None]
) -> Path:
    """Return the finished folder of model ``name``, making it if need be.

    Safe against a kill at any point and against other processes doing the same: one makes the
    model, the others wait for it.

    Args:
        name: name of the model and of its folder.
        recipe: number of the conversion.
        build: fills the folder.
        need_bytes: free disk space to ask for before starting.
        on_wait: called once if another process holds the lock.

    Raises:
        ModelError: the cache cannot be written or has too little room.
    """
    root = models_root()
    final = root / name
    if is_ready(final, recipe):
        return final
    with _writable(root), _locked(root / ".lock", on_wait):
        _sweep(root)
        if not is_ready(final, recipe):
            _make(root, final, recipe, build, need_bytes)
    return final


def _sweep(root: Path) -> None:
    for litter in list(root.glob(f"{WORK_PREFIX}*")):
        # Moved first: a download that outlived its killed parent can create nothing in it then.
        bin_folder = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=root))
        litter.rename(bin_folder / "litter")
        shutil.rmtree(bin_folder)


def _make(root: Path, final: Path, recipe: int, build: Build, need_bytes: int) -> None:
    free = shutil.disk_usage(root).free
    if free < need_bytes:
        raise ModelError(
            f"{root} has {free / 1e6:,.0f} MB free and making {final.name} needs "
            f"{need_bytes / 1e6:,.0f} MB; free some, or set {HOME_VARIABLE} to a larger disk"
        )
    work = Path(tempfile.mkdtemp(prefix=WORK_PREFIX, dir=root))
    try:
        made, scratch = work / "model", work / "scratch"
        made.mkdir()
        scratch.mkdir()
        build(made, scratch)
        sizes = {path.name: path.stat().st_size for path in sorted(made.iterdir())}
        (made / MANIFEST).write_text(json.dumps({"recipe": recipe, "files": sizes}, indent=1))
        if final.exists():
            final.rename(work / "replaced")
        made.rename(final)
    finally:
        shutil.rmtree(work)


@contextmanager
def _writable(root: Path) -> Iterator[None]:
    try:
        root.mkdir(parents=True, exist_ok=True)
        yield
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise ModelError(
            f"cannot keep models in {root}: {error}; set {HOME_VARIABLE} to a folder you can write"
        ) from error


@contextmanager
def _locked(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
