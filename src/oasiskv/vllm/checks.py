"""What the plugin does not support is refused at start, in one line that says what to change."""

from __future__ import annotations

from pkgutil import resolve_name
from typing import TYPE_CHECKING

from oasiskv.config import BLOCK_TOKENS
from oasiskv.errors import ConfigError, StateError
from oasiskv.stores.machine import available_bytes
from oasiskv.vllm.compat import BACKENDS, DISABLE, TESTED, installed_version, is_draft_layer
from oasiskv.vllm.plan import GIB, NULL_BLOCKS, MemoryPlan, gib
from oasiskv.vllm.settings import CONNECTOR, WORKERS, config_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheSpec

SPECULATIVE = {"cpu": ("ngram", "draft_model"), "cuda": ("ngram",)}
"""Platform -> speculative methods that are not refused."""


def check_platform(device_type: str) -> None:
    """Refuse devices and vLLM's versions that the plugin was not run on.

    Args:
        device_type: vLLM's platform.

    Raises:
        ConfigError: naming the platforms, or the versions, that it was run on.
    """
    found = installed_version()
    if device_type not in TESTED:
        raise ConfigError(
            f"vLLM's platform {device_type!r} is not supported: use one of {', '.join(TESTED)}, or "
            f"set {DISABLE}=1 to run without OasisKV"
        )
    versions = TESTED[device_type]
    if found.partition("+")[0] not in versions:
        raise ConfigError(
            f"vLLM {found} is not supported on {device_type}: OasisKV was tested with "
            f"{', '.join(versions)} there; install one of these, or set {DISABLE}=1 to run without "
            "OasisKV"
        )


def check_engine(vllm_config: VllmConfig) -> None:
    """Refuse what vLLM's configuration alone shows, before anything is loaded.

    Raises:
        ConfigError: for the first setting that is not supported.
    """
    platform = vllm_config.device_config.device_type
    check_platform(platform)
    config = config_of(vllm_config)
    _refuse("checksums", config.checksums and platform == "cuda", True, "leave it out on CUDA")
    parallel = vllm_config.parallel_config
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        _refuse(name, getattr(parallel, name) != 1, getattr(parallel, name), "set it to 1")
    executor = parallel.distributed_executor_backend
    _refuse(
        "distributed_executor_backend",
        executor == "external_launcher" and parallel.tensor_parallel_size != 1,
        executor,
        "with tensor_parallel_size above 1 set it to mp, so that one scheduler hears all workers",
    )
    role = vllm_config.kv_transfer_config.kv_role
    _refuse("kv_role", role != "kv_both", role, "set it to kv_both")
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    _refuse("kv_load_failure_policy", policy != "fail", policy, "set it to fail")
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
            speculative.method not in SPECULATIVE[platform],
            repr(speculative.method),
            f"use one of {', '.join(SPECULATIVE[platform])}, or no speculative_config",
        )
    model = vllm_config.model_config
    _refuse(
        "model",
        model.is_multimodal_model,
        f"{model.model}, which is multi-modal,",
        f"use a model of text alone, or set {DISABLE}=1 to run without OasisKV",
    )
    for name in ("enable_sleep_mode", "enable_cumem_allocator"):
        # Sleep discards what is in the memory of vLLM's KV cache, our digests too.
        _refuse(name, bool(getattr(model, name)), True, "leave it out")
    dtype = vllm_config.cache_config.cache_dtype
    own = str(model.dtype).removeprefix("torch.")
    _refuse("kv_cache_dtype", dtype not in ("auto", own), dtype, "set it to auto")
    _refuse(
        "model",
        model.use_mla,
        f"{model.model} with multi-latent attention",
        "use a model with full attention",
    )
    size = vllm_config.cache_config.block_size
    _refuse("block_size", size != BLOCK_TOKENS, size, f"set it to {BLOCK_TOKENS}")


def check_worker(worker_cls: str | type, device_type: str) -> None:
    """Refuse a worker class that does not bound the layers that the connector serves.

    Args:
        worker_cls: vLLM's setting.
        device_type: vLLM's platform.

    Raises:
        ConfigError: it is not OasisKV's.
    """
    if worker_cls == WORKERS[device_type]:
        return
    from oasiskv.vllm.worker import OasisGPUWorker

    found = resolve_name(worker_cls) if isinstance(worker_cls, str) else worker_cls
    if not issubclass(found, OasisGPUWorker):
        raise ConfigError(
            f"worker_cls={worker_cls} does not go with {CONNECTOR}: set worker_cls to "
            f"{WORKERS[device_type]}, as oasiskv.vllm.engine_args() does"
        )


def check_process() -> None:
    """Refuse a second engine in a process: vLLM keeps one connector for all of them.

    Raises:
        ConfigError: another engine's connector is there.
    """
    from vllm.distributed.kv_transfer import has_kv_transfer_group

    if has_kv_transfer_group():
        raise ConfigError(
            "another engine with a KV connector runs in this process, and vLLM keeps one connector "
            "for all of them: shut that engine down first, or set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=1, so that each has processes of its own"
        )


def check_layers(
    vllm_config: VllmConfig,
    specs: Mapping[str, KVCacheSpec],
    sparse: Mapping[str, KVCacheSpec],
) -> None:
    """Refuse models of which nothing can go sparse, or with layers that were not tried beside it.

    Args:
        vllm_config: vLLM's configuration.
        specs: vLLM's spec of each layer.
        sparse: those of layers with full attention.

    Raises:
        ConfigError: the target, or its draft model, has a layer and none with full attention; or
            one with something else than full attention or a sliding window.
    """
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    speculative = vllm_config.speculative_config
    models = {False: ("model", vllm_config.model_config.model)}
    if speculative is not None and speculative.method == "draft_model":
        models[True] = ("speculative_config model", speculative.draft_model_config.model)
    for is_draft, (setting, model) in models.items():
        if not any(is_draft_layer(name) == is_draft for name in sparse):
            kinds = {type(s).__name__ for n, s in specs.items() if is_draft_layer(n) == is_draft}
            raise ConfigError(
                f"{setting}={model} has no full-attention layer (found: "
                f"{', '.join(sorted(kinds)) or 'none'}), so nothing can go sparse: use a model "
                f"with full attention, or set {DISABLE}=1 to run without OasisKV"
            )
    beside = {name: type(spec) for name, spec in specs.items() if name not in sparse}
    for name, kind in beside.items():
        _refuse(
            "model",
            kind is not SlidingWindowSpec,
            f"{vllm_config.model_config.model} with layer {name} ({kind.__name__})",
            "use a model of full attention and sliding windows alone, or set "
            f"{DISABLE}=1 to run without OasisKV",
        )
    _refuse(
        "disable_hybrid_kv_cache_manager",
        bool(beside) and bool(vllm_config.scheduler_config.disable_hybrid_kv_cache_manager),
        f"True for {vllm_config.model_config.model}, which has sliding windows,",
        "leave it out",
    )


def check_backends(vllm_config: VllmConfig, sparse: Iterable[str]) -> None:
    """Refuse layers whose attention is not ours, whichever of vLLM's flags has chosen it.

    Args:
        vllm_config: vLLM's configuration, its model being loaded.
        sparse: names of the layers with full attention.

    Raises:
        ConfigError: one of them has another backend.
    """
    device = vllm_config.device_config.device_type
    ours = resolve_name(BACKENDS[device])
    for name in sparse:
        found = vllm_config.compilation_config.static_forward_context[name].get_attn_backend()
        _refuse(
            "attention_backend",
            not issubclass(found, ours),
            f"{found.get_name()} for layer {name}",
            "leave out what chooses another than oasiskv.vllm.engine_args() does "
            "(attention_backend, attention_config)",
        )


def check_workers(acknowledged: int, vllm_config: VllmConfig) -> None:
    """What only some workers have stored must not leave HBM.

    Args:
        acknowledged: workers that acknowledged a step together.
        vllm_config: vLLM's configuration.

    Raises:
        StateError: it was not all of them.
    """
    workers = vllm_config.parallel_config.tensor_parallel_size
    if acknowledged != workers:
        raise StateError(f"{acknowledged} of {workers} workers acknowledged a step")


def check_host_memory(nbytes: int, vllm_config: VllmConfig) -> None:
    """Refuse a host store that this machine has no memory for.

    All workers ask before any makes its part: later, each would see room that another is taking.

    Args:
        nbytes: of one worker's store.
        vllm_config: vLLM's configuration.

    Raises:
        ConfigError: there is less.
    """
    parallel = vllm_config.parallel_config
    # Of other executors it is not known which workers share a machine.
    together = parallel.local_world_size if parallel.distributed_executor_backend == "mp" else 1
    available = available_bytes()
    if nbytes * together > available:
        raise ConfigError(
            f"host_gib is too large: the host store of this machine's workers ({together}) needs "
            f"{gib(nbytes * together)} GiB, and {available / GIB:.4f} GiB of memory are "
            "available; lower host_gib, or raise the container's memory"
        )


def check_digests(available: int, digests: int, store_blocks: int) -> None:
    """Refuse digests that leave no KV memory.

    Args:
        available: bytes that vLLM found for its KV pool.
        digests: bytes of the digests.
        store_blocks: blocks of the host store, each of which has one.

    Raises:
        ConfigError: they do not fit.
    """
    if digests >= available:
        raise ConfigError(
            f"host_gib is too large: the digests of {store_blocks} store blocks take "
            f"{gib(digests)} GiB of the {gib(available)} GiB of KV memory; lower host_gib, set "
            "digest to minmax, or give vLLM more KV memory (gpu_memory_utilization, "
            "kv_cache_memory_bytes)"
        )


def check_sizes(plan: MemoryPlan) -> None:
    """Refuse tiers in which a request of ``max_model_len`` would wait for ever.

    Raises:
        ConfigError: naming the least store or pool, or the longest request that fits.
    """
    size = plan.block_tokens
    least = plan.stored_blocks * plan.block_bytes * plan.workers
    if plan.store_blocks < plan.stored_blocks:
        raise ConfigError(
            f"host_gib is too small: the host store holds {plan.store_blocks * size} tokens and a "
            f"request of max_model_len={plan.longest_tokens} needs {plan.stored_blocks * size}; "
            f"set host_gib to at least {gib(least)} or "
            f"max_model_len to at most {(plan.store_blocks + 1) * size - 1}"
        )
    if plan.pool_blocks < plan.needed_pool_blocks:
        slots = plan.hot_blocks if plan.goes_sparse else 0
        longest = (plan.pool_blocks - NULL_BLOCKS - slots) * size
        shorter = f", max_model_len to at most {longest}" if longest > 0 else ""
        digests = plan.store_blocks * plan.digest_bytes if plan.digests_in_pool else 0
        taken = f" after {digests} bytes of digests were taken off it" if digests else ""
        raise ConfigError(
            f"the KV pool is too small: it has {plan.pool_blocks} blocks{taken} and a request of "
            f"max_model_len={plan.longest_tokens} needs {plan.needed_pool_blocks} "
            f"({plan.dense_blocks} while dense, {slots} for its hot set, {NULL_BLOCKS} of vLLM's "
            f"own); set kv_cache_memory_bytes to at least "
            f"{plan.needed_pool_blocks * plan.block_bytes + digests} (num_gpu_blocks_override: "
            f"{plan.needed_pool_blocks}){shorter}, or lower hot_tokens"
        )


def _refuse(name: str, wrong: bool, value: object, legal: str) -> None:
    if wrong:
        raise ConfigError(f"{name}={value} is not supported by OasisKV: {legal}")
