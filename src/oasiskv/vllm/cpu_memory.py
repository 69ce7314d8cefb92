"""On the CPU the KV pool and the host store share the machine's memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oasiskv.errors import ConfigError
from oasiskv.stores.machine import available_bytes, total_bytes
from oasiskv.vllm.plan import GIB, gib
from oasiskv.vllm.settings import config_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_cpu_memory(vllm_config: VllmConfig) -> None:
    """Refuse a KV pool and a host store for which this machine's memory does not suffice.

    Where it is not said how large the pool is to be, vLLM takes ``gpu_memory_utilization`` of all
    memory for a worker, which is nearly all of it by default.

    Raises:
        ConfigError: on the CPU, and they are more than is available.
    """
    if vllm_config.device_config.device_type != "cpu":
        return
    cache = vllm_config.cache_config
    size = cache.kv_cache_memory_bytes
    if size is None:
        size = int(total_bytes() * cache.gpu_memory_utilization)
        asked = f"gpu_memory_utilization={cache.gpu_memory_utilization} of all memory"
    else:
        asked = f"kv_cache_memory_bytes={size}"
    parallel = vllm_config.parallel_config
    workers = parallel.local_world_size
    host_gib = config_of(vllm_config).host_gib or 0.0
    store = int(host_gib * GIB) * workers // parallel.tensor_parallel_size
    available = available_bytes()
    if size * workers + store <= available:
        return
    left = (available - store) // workers
    change = (
        f"set kv_cache_memory_bytes to at most {left} less what the model takes "
        "(--kv-cache-memory-bytes 512M, or the environment's VLLM_CPU_KVCACHE_SPACE, in GiB)"
        if left > 0
        else "lower host_gib"
    )
    raise ConfigError(
        f"the KV pool and the host store do not fit into the CPU's memory: {asked} is "
        f"{gib(size * workers)} GiB for this machine's workers ({workers}), host_gib={host_gib}, "
        f"and {available / GIB:.4f} GiB are available; {change}"
    )
