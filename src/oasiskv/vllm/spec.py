"""The KV-cache spec of a layer that may go sparse; importing this registers it with vLLM."""

from dataclasses import dataclass, fields
from typing import Self

from vllm.config import VllmConfig
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from oasiskv.config import OasisConfig
from oasiskv.vllm.compat import fits_null_block
from oasiskv.vllm.manager import OasisManager
from oasiskv.vllm.plan import NULL_BLOCKS
from oasiskv.vllm.shapes import ModelLayers, block_bytes, digest_bytes


@dataclass(frozen=True, kw_only=True)
class OasisSpec(FullAttentionSpec):
    """Full attention while dense; sink, hot set and window once sparse.

    Args:
        sink_blocks: blocks of the sink.
        hot_blocks: S, slots of a sparse request, blocks of vLLM's pool that are its own.
        window_blocks: closed blocks of the window.
        threshold_tokens: context length past which a request goes sparse.
        block_bytes: bytes of one block, over all layers that may go sparse, the draft's included.
            A spec is of one layer, and of all that the scheduler sees it is the only one.
        digest_bytes: bytes of one block's digest, over the same layers.
        mode: ``always``, or ``under_pressure``: only while the pool is short of blocks.
    """

    sink_blocks: int
    hot_blocks: int
    window_blocks: int
    threshold_tokens: int
    block_bytes: int
    digest_bytes: int
    mode: str

    @classmethod
    def of(
        cls, spec: FullAttentionSpec, config: OasisConfig, models: tuple[ModelLayers, ...]
    ) -> Self:
        """The spec of a full-attention layer; ``models`` are all that may go sparse."""
        # Fields move between vLLM's versions: take whatever this one has.
        return cls(
            **{field.name: getattr(spec, field.name) for field in fields(spec)},
            sink_blocks=config.sink_blocks,
            hot_blocks=config.hot_blocks,
            window_blocks=config.window_blocks,
            threshold_tokens=config.resolved_threshold_tokens,
            block_bytes=block_bytes(models),
            digest_bytes=digest_bytes(config, models),
            mode=config.mode,
        )

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """What the longest request needs: all dense, and where vLLM is to fit ``max_model_len``
        to the pool (-1), its slots, and vLLM's own block if vLLM forgets it.

        A ``max_model_len`` that was asked for is checked by ``check_sizes``, which says more.
        """
        dense: int = super().max_memory_usage_bytes(vllm_config)
        model = vllm_config.model_config
        if model.original_max_model_len != -1 or model.max_model_len <= self.threshold_tokens:
            return dense
        forgotten = 0 if fits_null_block() else NULL_BLOCKS
        return dense + (self.hot_blocks + forgotten) * int(self.page_size_bytes)

    @classmethod
    def merge(cls, specs: list[Self]) -> Self:
        """One spec for a group of layers; vLLM's own merge would drop our fields."""
        first = specs[0]
        if any(spec != first for spec in specs):
            # vLLM asks by it whether they are alike, and takes this for a no.
            raise AssertionError(f"layers of one group differ: {sorted(map(str, set(specs)))}")
        return first


# vLLM registers its own specs only while the registry is empty: they have to come first.
KVCacheSpecRegistry._ensure_registered()
KVCacheSpecRegistry.register(OasisSpec, OasisManager, uniform_type_base_spec=FullAttentionSpec)
