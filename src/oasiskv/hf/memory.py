"""Fast-tier memory of one request: all of its KV while dense, sink + slots + window once sparse."""

from collections.abc import Sequence

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.geometry import KVGeometry
from oasiskv.core.residency import ResidentMap
from oasiskv.ops.gather.reference import gather_tiles


class RequestKV:
    """KV blocks of one request, one tensor ``[blocks, heads, block_tokens, 2 * head_dim]`` a layer.

    Dense: block i of the request lies at index i. Sparse: the sink comes first, then the slots,
    then a ring of window blocks. A layer with a sliding window always is a ring.

    Args:
        geometry: sizes of a block.
        sliding_windows: per model layer its sliding window in tokens, or None for full attention.
        config: sizes of sink, hot set and window.
        dense_tokens: most tokens that the request holds while dense.
        step_rows: most tokens computed for the request in one step while dense.
        device: where attention runs.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        sliding_windows: Sequence[int | None],
        config: OasisConfig,
        dense_tokens: int,
        step_rows: int,
        device: torch.device,
    ) -> None:
        self._geometry = geometry
        self._config = config
        self._device = device
        self._sliding = list(sliding_windows)
        self.full_layers = [i for i, window in enumerate(sliding_windows) if window is None]
        self.sparse = False
        self.num_sinks = 0
        self.window_start = 0
        self.slot_base = config.sink_blocks
        self._ring_base = config.sink_blocks + config.hot_blocks
        rows = 1 + config.draft_tokens
        self._ring_blocks = config.window_blocks + 2 + rows // geometry.block_tokens
        self.layers = [
            self._new(
                geometry.blocks_for(dense_tokens)
                if window is None
                else geometry.blocks_for(window + step_rows) + 2
            )
            for window in sliding_windows
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of the full-attention layers, from their storages."""
        return sum(self.layers[layer].untyped_storage().nbytes() for layer in self.full_layers)

    @property
    def slot_nbytes(self) -> int:
        """Bytes of the slots among ``nbytes``, from the view of them; 0 while dense."""
        if not self.sparse:
            return 0
        slots = slice(self.slot_base, self._ring_base)
        return sum(self.layers[layer][slots].nbytes for layer in self.full_layers)

    def layer(self, layer: int) -> torch.Tensor:
        """Blocks of one sparse layer, ``[blocks, heads, block_tokens, 2 * head_dim]``."""
        return self.layers[self.full_layers[layer]]

    def slot_index(self, slots: torch.Tensor) -> torch.Tensor:
        """Index into ``layer``'s blocks of each slot, int64 of any shape; -1 stays -1."""
        return torch.where(slots >= 0, slots + self.slot_base, -1)

    def write(self, layer: int, start: int, kv: torch.Tensor) -> None:
        """Write the KV of new tokens.

        Args:
            layer: model layer.
            start: position of the first token.
            kv: ``[tokens, heads, 2 * head_dim]``.
        """
        positions = torch.arange(start, start + kv.shape[0], device=self._device)
        size = self._geometry.block_tokens
        self.layers[layer][self._place(layer, positions // size), :, positions % size] = kv

    def table(self, layer: int, start: int, tokens: int, filled: int) -> tuple[torch.Tensor, int]:
        """The compact block table.

        Args:
            layer: model layer.
            start: position of the first query token.
            tokens: tokens of the request, the query tokens included.
            filled: slots that hold a block.

        Returns:
            ``(block_table, kv_tokens)``: int64 indices into the layer's blocks, oldest first, and
            the tokens that they hold, the last block perhaps in part.
        """
        size = self._geometry.block_tokens
        end = self._geometry.blocks_for(tokens)
        window = self._sliding[layer]
        if window is not None:
            first = max(0, start - window + 1) // size
            recent = torch.arange(first, end, device=self._device)
            return self._place(layer, recent), tokens - first * size
        recent = self._place(layer, torch.arange(self.window_start, end, device=self._device))
        if not self.sparse:
            return recent, tokens
        kept = torch.cat(
            (
                torch.arange(self.num_sinks, device=self._device),
                torch.arange(self.slot_base, self.slot_base + filled, device=self._device),
            )
        )
        return torch.cat((kept, recent)), (len(kept) - self.window_start) * size + tokens

    def tiles(self, first: int, end: int) -> torch.Tensor:
        """A copy of blocks ``first..end-1``, which are dense or in the window.

        Returns:
            ``[end - first, full layers, heads, block_tokens, 2 * head_dim]``.
        """
        blocks = torch.arange(first, end, device=self._device)
        return torch.stack(
            [self.layers[layer][self._place(layer, blocks)] for layer in self.full_layers], dim=1
        )

    def go_sparse(self, chosen: torch.Tensor, num_sinks: int, start: int, end: int) -> None:
        """The transition: keep sink, chosen tiles and window; give everything else back.

        Args:
            chosen: int64 ``[full layers, heads, n]`` blocks for slots 0..n-1.
            num_sinks: blocks of the sink.
            start: first block of the window.
            end: one past the last block that holds a token.
        """
        sinks = torch.arange(num_sinks, device=self._device)
        window = torch.arange(start, end, device=self._device)
        slots = self.slot_base + torch.arange(chosen.shape[-1], device=self._device)
        self.sparse = True
        self.num_sinks = num_sinks
        self.window_start = start
        for layer, blocks in zip(self.full_layers, chosen, strict=True):
            dense = self.layers[layer]
            compact = self._new(self._ring_base + self._ring_blocks)
            compact[sinks] = dense[sinks]
            gather_tiles(dense, blocks, compact, slots.expand_as(blocks))
            compact[self._place(layer, window)] = dense[window]
            self.layers[layer] = compact

    def advance(self, start: int, residents: ResidentMap, step: int) -> None:
        """Move the window on: a leaving block goes to the sink, to a free slot, or away.

        Args:
            start: new first block of the window; the leaving blocks are in the store.
            residents: the resident map; takes the leaving blocks while it has free slots.
            step: the step that asks.
        """
        for block in range(self.window_start, start):
            if block < self._config.sink_blocks:
                place = block
                self.num_sinks += 1
            elif residents.filled < residents.num_slots:
                place = self.slot_base + residents.append(block, step)
            else:
                continue
            for layer in self.full_layers:
                self.layers[layer][place] = self.layers[layer][
                    self._ring_base + block % self._ring_blocks
                ]
        self.window_start = start

    def load(self, layers: Sequence[torch.Tensor], tokens: int) -> None:
        """Copy dense KV computed elsewhere.

        Args:
            layers: per model layer ``[blocks, heads, block_tokens, 2 * head_dim]``.
            tokens: tokens that they hold.
        """
        blocks = self._geometry.blocks_for(tokens)
        for own, other in zip(self.layers, layers, strict=True):
            own[:blocks] = other[:blocks]

    def drop(self) -> None:
        """Give all memory back."""
        self.layers.clear()
        self.full_layers.clear()

    def _place(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        if self._sliding[layer] is not None:
            return blocks % self.layers[layer].shape[0]
        if self.sparse:
            return self._ring_base + blocks % self._ring_blocks
        return blocks

    def _new(self, blocks: int) -> torch.Tensor:
        return torch.empty(
            (blocks, self._geometry.num_kv_heads, *self._geometry.tile_shape),
            dtype=self._geometry.dtype,
            device=self._device,
        )
