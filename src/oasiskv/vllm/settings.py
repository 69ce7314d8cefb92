"""OasisKV's settings and sizes, read from vLLM's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oasiskv.config import OasisConfig
from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from oasiskv.vllm.spec import OasisSpec


def config_of(vllm_config: VllmConfig) -> OasisConfig:
    """The settings in ``kv_connector_extra_config``, one to one those of ``OasisConfig``.

    Raises:
        ConfigError: there is no such configuration, a setting is not legal, or ``host_gib`` is
            missing.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        raise ConfigError(
            "OasisKV's worker needs its connector: set kv_transfer_config to OasisConnector, as "
            "oasiskv.vllm.engine_args() does"
        )
    config = OasisConfig(**transfer.kv_connector_extra_config)
    if config.host_gib is None:
        raise ConfigError("host_gib is not set: give the size of the host store, GiB")
    return config


def sparse_layers(cache: KVCacheConfig | None) -> tuple[OasisSpec, list[str]]:
    """Spec and names of the layers that may go sparse.

    Raises:
        ConfigError: there is not exactly one group of them.
    """
    from oasiskv.vllm.spec import OasisSpec

    groups = [
        (group.kv_cache_spec, list(group.layer_names))
        for group in (cache.kv_cache_groups if cache is not None else [])
        if isinstance(group.kv_cache_spec, OasisSpec)
    ]
    if len(groups) != 1:
        raise ConfigError(
            f"{len(groups)} groups of layers carry OasisKV's spec and 1 is needed: is the worker "
            "class set, as oasiskv.vllm.engine_args() does?"
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
