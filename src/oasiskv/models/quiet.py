"""Silencing transformers while one progress bar of ours stands for all of its own."""

import io
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr

from transformers.utils import logging as transformers_logging


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and warnings inside the block; its settings come back after.

    Errors are raised as ever: only what is merely drawn or warned about goes.
    """
    verbosity = transformers_logging.get_verbosity()
    had_bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # The bar of the GGUF reader ignores transformers' setting and writes to sys.stderr.
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if had_bars:
            transformers_logging.enable_progress_bar()
