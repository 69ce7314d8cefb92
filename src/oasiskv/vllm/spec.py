"""The KV-cache spec of a layer that may go sparse; importing this registers it with vLLM."""

from dataclasses import dataclass, fields
from typing import Self

from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from oasiskv.config import OasisConfig
from oasiskv.vllm.manager import OasisManager


@dataclass(frozen=True, kw_only=True)
class OasisSpec(FullAttentionSpec):
    """Full attention while dense; sink, hot set and window once sparse.

    Args:
        sink_blocks: blocks of the sink.
        hot_blocks: S, slots of a sparse request, blocks of vLLM's pool that are its own.
        window_blocks: closed blocks of the window.
        threshold_tokens: context length past which a request goes sparse.
        mode: ``always``, or ``under_pressure``: only while the pool is short of blocks.
    """

    sink_blocks: int
    hot_blocks: int
    window_blocks: int
    threshold_tokens: int
    mode: str

    @classmethod
    def of(cls, spec: FullAttentionSpec, config: OasisConfig) -> Self:
        """The spec of a full-attention layer under ``config``."""
        # Fields move between vLLM's versions: take whatever this one has.
        return cls(
            **{field.name: getattr(spec, field.name) for field in fields(spec)},
            sink_blocks=config.sink_blocks,
            hot_blocks=config.hot_blocks,
            window_blocks=config.window_blocks,
            threshold_tokens=config.resolved_threshold_tokens,
            mode=config.mode,
        )

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for a group of layers; vLLM's own merge would drop our fields."""
        first = specs[0]
        if any(spec != first for spec in specs):
            raise ValueError(f"layers of one KV cache group differ: {sorted(map(str, set(specs)))}")
        return first


# vLLM registers its own specs only while the registry is empty: they have to come first.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(OasisSpec, OasisManager, uniform_type_base_spec=FullAttentionSpec)
