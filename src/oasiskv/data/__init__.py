"""Files that travel with the package: texts, the demo document, the 32K adapter, traces."""

from importlib.resources import files
from pathlib import Path


def data_path(name: str) -> Path:
    """Return the path of a data file.

    Args:
        name: path below this folder, e.g. ``texts/persuasion.txt``.

    Raises:
        FileNotFoundError: there is no such file.
    """
    path = Path(str(files(__name__).joinpath(name)))
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: the installed package is incomplete")
    return path
