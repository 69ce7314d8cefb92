"""The CPU attention backend in plain PyTorch, on the reference op: the oracle for the GPU's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from vllm.v1.attention.backend import AttentionImpl, CommonAttentionMetadata
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.kv_cache_interface import KVCacheSpec

from oasiskv.config import BLOCK_TOKENS
from oasiskv.errors import ConfigError
from oasiskv.ops.attend.reference import attend
from oasiskv.vllm.runtime import current_runtime, rows_of_step
from oasiskv.vllm.spec import OasisSpec


class OasisTorchBackend(CPUAttentionBackend):
    """vLLM's CPU backend with our metadata and our attention, KV as plain ``[K | V]`` rows."""

    forward_includes_kv_cache_update = True

    @staticmethod
    def get_supported_kernel_block_sizes(
        kv_cache_spec: KVCacheSpec | None = None,  # not every version of vLLM passes it
    ) -> list[int]:
        """Any size would do for plain PyTorch; vLLM's own kernels may want larger blocks."""
        return [BLOCK_TOKENS]

    @staticmethod
    def get_impl_cls() -> Callable[..., OasisTorchImpl | WindowImpl]:
        """Our attention, or vLLM's: which one shows when a layer makes it."""
        return _attention_of

    @staticmethod
    def get_builder_cls() -> type[OasisTorchBuilder]:
        """Our metadata."""
        return OasisTorchBuilder


@dataclass
class OasisRows:
    """Metadata of one step.

    Args:
        names: request id of each row.
        starts: first query token of each row, and the total.
        kv_tokens: tokens of each request, those of this step included.
        block_table: ``[rows, blocks]``, vLLM's.
        slot_mapping: ``[tokens]``, where vLLM puts each new token.
    """

    names: tuple[str, ...]
    starts: list[int]
    kv_tokens: list[int]
    block_table: torch.Tensor
    slot_mapping: torch.Tensor


class OasisTorchBuilder(CPUAttentionMetadataBuilder):
    """Adds the request ids to what vLLM knows of a step, for layers that may go sparse."""

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> OasisRows | CPUAttentionMetadata:
        """The rows of this step, in vLLM's order."""
        common = common_attn_metadata
        if not isinstance(self.kv_cache_spec, OasisSpec):
            return super().build(common_prefix_len, common, fast_build)
        rows = common.num_reqs
        return OasisRows(
            names=rows_of_step(rows),
            starts=common.query_start_loc_cpu[: rows + 1].tolist(),
            kv_tokens=common.seq_lens[:rows].tolist(),
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
        )


class OasisTorchImpl(AttentionImpl[OasisRows]):
    """Writes new KV, then attends row by row."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        **features: Any,  # noqa: ANN401 - whatever a model's attention passes
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        unsupported = {
            "alibi": alibi_slopes,
            "logits soft cap": logits_soft_cap,
            "KV sharing": kv_sharing_target_layer_name,
            "attention type": None if attn_type == "decoder" else attn_type,
            **features,
        }
        for feature, value in unsupported.items():
            if value:
                raise ConfigError(
                    f"OasisKV's CPU attention does not support {feature} ({value}); "
                    "OASISKV_DISABLE=1 runs stock vLLM"
                )

    def forward(
        self,
        layer: Any,  # noqa: ANN401 - vLLM's attention layer
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: OasisRows | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; shapes ``[tokens, heads, head_dim]``."""
        if attn_metadata is None:
            return output.zero_()
        rows = attn_metadata
        total = rows.starts[-1]
        slots = rows.slot_mapping[:total].long()
        kept = slots >= 0
        size = kv_cache.shape[2]
        new = torch.cat((key[:total][kept], value[:total][kept]), dim=-1)
        kv_cache[slots[kept] // size, :, slots[kept] % size] = new
        runtime = current_runtime()
        result = output.view(-1, self.num_heads, self.head_size)
        for index, name in enumerate(rows.names):
            start, stop = rows.starts[index], rows.starts[index + 1]
            # A draft model's rows end with room for rejected drafts: nothing is kept of it, and
            # what it would attend to was not written.
            padding = int((~kept[start:stop]).sum())
            part = slice(start, stop - padding)
            result[stop - padding : stop] = 0
            if part.stop > part.start:
                runtime.before_attention(layer.layer_name, name, query[part])
                tokens = rows.kv_tokens[index] - padding
                sparse = runtime.table(layer.layer_name, name, tokens)
                table, tokens = sparse or (rows.block_table[index].long(), tokens)
                result[part] = attend(query[part], kv_cache, table, tokens, self.scale)
        return output


class WindowImpl(CPUAttentionBackendImpl):
    """vLLM's own attention for layers with a sliding window, which stay as they are."""

    def forward(
        self,
        layer: Any,  # noqa: ANN401 - vLLM's attention layer
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """vLLM's, after writing the KV, which vLLM leaves to all layers of our backend."""
        if attn_metadata is not None:
            self.do_kv_cache_update(layer, key, value, kv_cache, attn_metadata.slot_mapping)
        result: torch.Tensor = super().forward(
            layer,
            query,
            key,
            value,
            kv_cache,
            attn_metadata,
            output,
            output_scale,
            output_block_scale,
        )
        return result


def _attention_of(
    num_heads: int,
    head_size: int,
    scale: float,
    num_kv_heads: int,
    alibi_slopes: list[float] | None,
    sliding_window: int | None,
    *settings: Any,  # noqa: ANN401 - vLLM's own
    **features: Any,  # noqa: ANN401 - whatever a model's attention passes
) -> OasisTorchImpl | WindowImpl:
    """The attention of one layer, made as vLLM makes it."""
    sizes = (num_heads, head_size, scale, num_kv_heads, alibi_slopes)
    if sliding_window is None:
        return OasisTorchImpl(*sizes, sliding_window, *settings, **features)
    return WindowImpl(*sizes, sliding_window, *settings, **features)
