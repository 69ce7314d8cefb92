"""From what a user writes for ``--model`` to something that transformers can load."""

import re
from pathlib import Path

from oasiskv.errors import ModelError
from oasiskv.models.catalog import BUILT_INS
from oasiskv.models.prepare import fetch_model

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def resolve_model(name_or_path: str) -> Path | str:
    """Return the model's folder, or its hub id as it is.

    Args:
        name_or_path: a built-in name (fetched if need be), a local Hugging Face folder, or a hub
            id of the form ``org/name``. An existing folder goes before a hub id.

    Raises:
        ModelError: it is none of these, the folder holds no config.json, or fetching failed.
    """
    if name_or_path in BUILT_INS:
        return fetch_model(name_or_path)
    folder = Path(name_or_path).expanduser()
    if name_or_path and folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(
                f"{folder} holds no config.json: a folder saved by save_pretrained is needed"
            )
        return folder
    if folder.is_file():
        raise ModelError(f"{folder} is a file: the Hugging Face folder of a model is needed")
    if HUB_ID.fullmatch(name_or_path):
        return name_or_path
    raise ModelError(
        f"{name_or_path!r} is neither a built-in model nor an existing folder nor a hub id like "
        f"org/name; built-in models: {', '.join(BUILT_INS)}"
    )
