"""Engines are checked where they are configured, before they have a process or load anything."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oasiskv.errors import ConfigError
from oasiskv.stores.machine import total_bytes
from oasiskv.vllm.checks import check_engine, check_worker
from oasiskv.vllm.cpu_memory import check_cpu_memory
from oasiskv.vllm.plan import GIB
from oasiskv.vllm.settings import config_of, is_asked, stays_dense

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def check_made(vllm_config: VllmConfig) -> None:
    """Refuse an engine where it is configured, before it has a process or anything is loaded.

    An engine without OasisKV's worker and connector is none of ours.

    Raises:
        ConfigError: for the first setting that is not supported, or memory that this machine
            does not have.
    """
    if not is_asked(vllm_config) or stays_dense(vllm_config):
        return
    check_engine(vllm_config)
    check_worker(vllm_config.parallel_config.worker_cls, vllm_config.device_config.device_type)
    check_machine(vllm_config)
    check_cpu_memory(vllm_config)


def check_machine(vllm_config: VllmConfig) -> None:
    """Refuse a host store beyond all memory of this machine, if all workers will run on it.

    How much of it is free, ``check_host_memory`` sees when it is to be taken.

    Raises:
        ConfigError: it is.
    """
    parallel = vllm_config.parallel_config
    elsewhere = (
        parallel.distributed_executor_backend not in ("uni", "mp")
        or parallel.nnodes > 1
        or parallel.data_parallel_size_local == 0
    )
    asked, has = config_of(vllm_config).host_gib or 0.0, total_bytes() / GIB
    if not elsewhere and asked > has:
        raise ConfigError(
            f"host_gib={asked} is too large: this machine, or its container, has {has:.4f} GiB of "
            "memory in all; lower host_gib, or raise the container's memory"
        )
