"""Which layers may go sparse, of which model, and the sizes of their blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.core.digests import DigestPool
from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import ConfigError
from oasiskv.vllm.compat import DISABLE, is_draft_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

    from oasiskv.vllm.spec import OasisSpec


KV_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of the KV cache; what a tile and its digest are computed in."""


@dataclass(frozen=True)
class ModelLayers:
    """The layers of one model that may go sparse: those of the target, or of its draft model.

    Args:
        names: vLLM's names, in order.
        geometry: sizes of one block over them, in one worker.
        is_draft: they are the draft model's.
    """

    names: tuple[str, ...]
    geometry: KVGeometry
    is_draft: bool


@dataclass(frozen=True)
class SparseGroup:
    """vLLM's KV-cache group of the layers that may go sparse.

    Args:
        index: among vLLM's groups; a request has a block table in each.
        specs: of its layers, by name. The scheduler sees one spec for all of them.
    """

    index: int
    specs: dict[str, OasisSpec]


def sparse_group(cache: KVCacheConfig) -> SparseGroup:
    """The group of the layers that may go sparse.

    Raises:
        ConfigError: there is not exactly one, or vLLM has changed the size of its blocks.
    """
    from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs

    from oasiskv.vllm.spec import OasisSpec

    found = []
    for index, group in enumerate(cache.kv_cache_groups):
        spec = group.kv_cache_spec
        if isinstance(spec, UniformTypeKVCacheSpecs):
            specs = {name: spec.kv_cache_specs[name] for name in group.layer_names}
        else:
            specs = dict.fromkeys(group.layer_names, spec)
        if all(isinstance(one, OasisSpec) for one in specs.values()):
            found.append(SparseGroup(index, specs))
    if len(found) != 1:
        kinds = ", ".join(type(group.kv_cache_spec).__name__ for group in cache.kv_cache_groups)
        raise ConfigError(
            f"{len(found)} groups of layers may go sparse and 1 is needed (groups: "
            f"{kinds or 'none'}): use a model whose full-attention layers are alike, or set "
            f"{DISABLE}=1 to run without OasisKV"
        )
    for name, one in found[0].specs.items():
        # So that all groups share one pool where the KV of a token differs in size.
        if one.block_size != BLOCK_TOKENS or one.page_size_padded is not None:
            raise ConfigError(
                f"vLLM gives layer {name} blocks of {one.block_size} tokens in "
                f"{one.page_size_bytes} bytes, for other layers of the model need blocks of "
                f"another size, and blocks of {BLOCK_TOKENS} tokens without padding are needed: "
                f"use a model whose layers have KV of one size, or set {DISABLE}=1 to run without "
                "OasisKV"
            )
    return found[0]


def models_of(
    vllm_config: VllmConfig, specs: Mapping[str, FullAttentionSpec]
) -> tuple[ModelLayers, ...]:
    """The target's layers and, with a draft model, the draft's.

    Args:
        vllm_config: vLLM's configuration.
        specs: spec of each layer that may go sparse.

    Raises:
        ConfigError: the layers of one model differ in shape, or their KV is quantized.
    """
    parallel = vllm_config.parallel_config
    target = vllm_config.model_config.get_num_attention_heads(parallel)
    drafts = {name: spec for name, spec in specs.items() if is_draft_layer(name)}
    targets = {name: spec for name, spec in specs.items() if name not in drafts}
    models = [ModelLayers(tuple(targets), _geometry(targets, target), is_draft=False)]
    if drafts:
        speculative = vllm_config.speculative_config
        heads = speculative.draft_model_config.get_num_attention_heads(
            speculative.draft_parallel_config
        )
        models.append(ModelLayers(tuple(drafts), _geometry(drafts, heads), is_draft=True))
    return tuple(models)


def block_bytes(models: tuple[ModelLayers, ...]) -> int:
    """Bytes of one block, over all layers that may go sparse."""
    return sum(model.geometry.block_bytes for model in models)


def digest_bytes(config: OasisConfig, models: tuple[ModelLayers, ...]) -> int:
    """Bytes of one block's digest, over all layers that may go sparse."""
    return sum(digest_row_bytes(config, model.geometry) for model in models)


def digest_row_bytes(config: OasisConfig, geometry: KVGeometry) -> int:
    """Bytes of one block's digest over the layers and KV heads of ``geometry``."""
    one = DigestPool(geometry, 1, config.digest, config.minmax_mix, torch.device("cpu"))
    return one.row_bytes


def store_capacity_blocks(config: OasisConfig, size: int, workers: int) -> int:
    """Blocks of ``size`` bytes that the host store of one of ``workers`` workers holds."""
    if config.host_gib is None:
        raise ConfigError("host_gib is not set: give the size of the host store, GiB")
    return int(config.host_gib * 2**30) // (size * workers)


def _geometry(specs: Mapping[str, FullAttentionSpec], query_heads: int) -> KVGeometry:
    shapes = {(s.num_kv_heads, s.head_size, s.block_size, s.dtype) for s in specs.values()}
    if len(shapes) != 1:
        text = ", ".join(
            f"{heads} heads of {size}" for heads, size, _, _ in sorted(shapes, key=str)
        )
        raise ConfigError(
            f"the full-attention layers have {len(shapes)} shapes of KV ({text}) and 1 is needed: "
            f"use a model whose full-attention layers are alike, or set {DISABLE}=1 to run without "
            "OasisKV"
        )
    [(kv_heads, head_dim, block_tokens, dtype)] = shapes
    if dtype not in KV_DTYPES:
        raise ConfigError(
            f"kv_cache_dtype: the model's KV is of {dtype}, which is not supported by OasisKV "
            f"({', '.join(map(str, KV_DTYPES))} are): set it to the dtype of the model, or set "
            f"{DISABLE}=1 to run without OasisKV"
        )
    return KVGeometry(
        num_layers=len(specs),
        num_kv_heads=kv_heads,
        num_query_heads=query_heads,
        head_dim=head_dim,
        block_tokens=block_tokens,
        dtype=dtype,
    )
