"""OasisKV's settings and sizes, read from vLLM's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oasiskv.config import OasisConfig
from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import ConfigError
from oasiskv.vllm.compat import DISABLE

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from oasiskv.vllm.spec import OasisSpec

CONNECTOR = "OasisConnector"
WORKER = "oasiskv.vllm.worker.OasisCPUWorker"
VLLM_HAS = {
    "draft_tokens": "speculative_config num_speculative_tokens",
    "prefill_tokens": "max_num_batched_tokens",
}
"""Settings of the reference engine for which vLLM has its own."""


def config_of(vllm_config: VllmConfig) -> OasisConfig:
    """The settings in ``kv_connector_extra_config``, one to one those of ``OasisConfig``.

    Raises:
        ConfigError: there is no such configuration, a setting is not legal, or ``host_gib`` is
            missing.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        raise ConfigError(
            f"kv_transfer_config={transfer and transfer.kv_connector} does not go with OasisKV's "
            f"worker: set kv_connector to {CONNECTOR}, as oasiskv.vllm.engine_args() does"
        )
    config = OasisConfig(**transfer.kv_connector_extra_config)
    check_settings(config)
    return config


def check_settings(config: OasisConfig) -> None:
    """Refuse settings that mean nothing to the plugin, rather than ignore them.

    Raises:
        ConfigError: one of them is set, or ``host_gib`` is missing.
    """
    if config.host_gib is None:
        raise ConfigError("host_gib is not set: give the size of the host store, GiB")
    if config.mode == "dense":
        raise ConfigError(
            "mode=dense is not legal in vLLM: it must be 'always' or 'under_pressure'; set "
            f"{DISABLE}=1 to run without OasisKV"
        )
    for name, instead in VLLM_HAS.items():
        if name in config.model_fields_set:
            raise ConfigError(
                f"{name}={getattr(config, name)} is not legal in vLLM: leave it out and set vLLM's "
                f"{instead}"
            )


def sparse_layers(cache: KVCacheConfig | None) -> tuple[OasisSpec, list[str]]:
    """Spec and names of the layers that may go sparse.

    Raises:
        ConfigError: there is not exactly one group of them.
    """
    from oasiskv.vllm.spec import OasisSpec

    found = list(cache.kv_cache_groups) if cache is not None else []
    groups = [
        (group.kv_cache_spec, list(group.layer_names))
        for group in found
        if isinstance(group.kv_cache_spec, OasisSpec)
    ]
    if len(groups) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in found) or "none"
        raise ConfigError(
            f"{len(groups)} groups of layers may go sparse and 1 is needed (groups: {kinds}): use "
            f"a model whose full-attention layers are alike, or set {DISABLE}=1 to run without "
            "OasisKV"
        )
    return groups[0]


def geometry_of(vllm_config: VllmConfig, cache: KVCacheConfig | None) -> KVGeometry:
    """Sizes of a block over the sparse layers of one worker."""
    spec, names = sparse_layers(cache)
    heads = vllm_config.model_config.get_num_attention_heads(vllm_config.parallel_config)
    return KVGeometry(
        num_layers=len(names),
        num_kv_heads=spec.num_kv_heads,
        num_query_heads=heads,
        head_dim=spec.head_size,
        block_tokens=spec.block_size,
        dtype=spec.dtype,
    )


def store_capacity_blocks(config: OasisConfig, geometry: KVGeometry) -> int:
    """Blocks that the host store of one worker holds."""
    if config.host_gib is None:
        raise ConfigError("host_gib is not set: give the size of the host store, GiB")
    return int(config.host_gib * 2**30) // geometry.block_bytes
