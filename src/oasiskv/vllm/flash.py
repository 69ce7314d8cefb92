"""The CUDA attention backend: vLLM's FlashAttention over compact block tables."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadata,
    FlashAttentionMetadataBuilder,
)

from oasiskv.core.batch import QueryRows
from oasiskv.vllm.batch_layers import CompactTables
from oasiskv.vllm.runtime import current_runtime, installed_runtime, rows_of_step
from oasiskv.vllm.spec import OasisSpec


class OasisFlashBackend(FlashAttentionBackend):
    """vLLM's FlashAttention, one compact block table per sparse request for all its layers."""

    @staticmethod
    def get_name() -> str:
        """The name under which vLLM lets a plugin register a backend."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[OasisFlashImpl]:
        """Our attention."""
        return OasisFlashImpl

    @staticmethod
    def get_builder_cls() -> type[OasisFlashBuilder]:
        """Our metadata."""
        return OasisFlashBuilder

    @classmethod
    def get_required_kv_cache_layout(cls) -> str:
        """Heads before tokens, so that a tile is contiguous."""
        return "HND"


@dataclass
class OasisFlashMetadata(FlashAttentionMetadata):
    """vLLM's, with the requests of its rows.

    Args:
        rows: which queries are kept; None while vLLM profiles.
    """

    rows: QueryRows | None = None


class OasisFlashBuilder(FlashAttentionMetadataBuilder):
    """Replaces the block tables of sparse requests by compact ones.

    Graphs that vLLM captures read tables, lengths and where queries go from tensors that stay.
    """

    supports_update_block_table = False
    _tables: torch.Tensor | None = None
    _kv_tokens: torch.Tensor | None = None

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> OasisFlashMetadata:
        """The rows of this step, in vLLM's order; none while a graph is captured.

        Layers that do not go sparse, as those with a sliding window, get vLLM's metadata.
        """
        common = common_attn_metadata
        runtime = installed_runtime()
        rows = None
        if runtime is not None and isinstance(self.kv_cache_spec, OasisSpec):
            names = rows_of_step(common.num_reqs)
            starts = common.query_start_loc_cpu[: len(names) + 1].tolist()
            batched = runtime.batched
            rows = batched.query_rows(names, starts, common.num_actual_tokens)
            common = self._compacted(common, batched.compact(names, starts))
        built = super().build(0, common, fast_build)
        values = {field.name: getattr(built, field.name) for field in fields(built)}
        return OasisFlashMetadata(**values, rows=rows)

    def use_cascade_attention(self, *args: Any, **settings: Any) -> bool:  # noqa: ANN401
        """No prefix is common to all rows: a sparse request reads a table of its own."""
        return False

    def _compacted(
        self, common: CommonAttentionMetadata, compact: CompactTables | None
    ) -> CommonAttentionMetadata:
        """``common`` with the tables and lengths of sparse requests; not modified in place."""
        if self._tables is None or self._kv_tokens is None:
            most = self.vllm_config.scheduler_config.max_num_seqs
            self._tables = common.block_table_tensor.new_zeros(
                (most, common.block_table_tensor.shape[1])
            )
            self._kv_tokens = common.seq_lens.new_zeros(most)
        tables, kv_tokens = self._tables[: common.num_reqs], self._kv_tokens[: common.num_reqs]
        tables.copy_(common.block_table_tensor)
        kv_tokens.copy_(common.seq_lens)
        longest = common.max_seq_len
        if compact is not None:
            tables[:, : compact.tables.shape[1]].index_copy_(0, compact.rows, compact.tables)
            kv_tokens.index_copy_(0, compact.rows, compact.kv_tokens)
            longest = compact.longest
        return common.replace(block_table_tensor=tables, seq_lens=kv_tokens, max_seq_len=longest)


class OasisFlashImpl(FlashAttentionImpl):
    """FlashAttention that keeps the queries that look ahead."""

    def forward(
        self,
        layer: Any,  # noqa: ANN401 - vLLM's attention layer
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: OasisFlashMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer; shapes ``[tokens, heads, head_dim]``."""
        if attn_metadata is not None and attn_metadata.rows is not None:
            current_runtime().batched.keep_queries(layer.layer_name, query, attn_metadata.rows)
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

    def do_kv_cache_update(
        self,
        layer: Any,  # noqa: ANN401 - vLLM's attention layer
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write new KV, once what runs aside is done with this layer.

        That covers blocks given back and handed out again as well, and the slots that are read
        next.
        """
        runtime = installed_runtime()
        if runtime is not None:
            runtime.batched.wait(layer.layer_name)
        super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
