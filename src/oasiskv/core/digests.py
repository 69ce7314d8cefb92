"""The digest pool: what every closed block is scored by, in the fast tier, by store block."""

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import StateError
from oasiskv.ops.digest.reference import Keys4, build_keys4, build_minmax
from oasiskv.ops.score.reference import keys4_logits, minmax_logits


class DigestPool:
    """Digests of all layers and heads, row i for store block i, allocated once.

    Args:
        geometry: sizes of a block.
        capacity_blocks: rows, the capacity of the store.
        kind: ``minmax`` or ``keys4``.
        minmax_mix: weight of the spread for ``minmax``.
        device: where attention runs.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        capacity_blocks: int,
        kind: Literal["minmax", "keys4"],
        minmax_mix: float,
        device: torch.device,
    ) -> None:
        self.kind = kind
        self._geometry = geometry
        self._mix = minmax_mix
        sample = self._build(
            torch.zeros(
                (1, geometry.num_layers, geometry.num_kv_heads, *geometry.tile_shape),
                dtype=geometry.dtype,
                device=device,
            )
        )
        self._parts = tuple(part.new_empty((capacity_blocks, *part.shape[1:])) for part in sample)
        self._users: Counter[int] = Counter()

    @property
    def rows_used(self) -> int:
        """Blocks that have a digest now."""
        return len(self._users)

    @property
    def row_bytes(self) -> int:
        """Bytes of one block's digest, all layers and heads."""
        return sum(part[0].numel() * part.element_size() for part in self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, from its storages."""
        return sum(part.untyped_storage().nbytes() for part in self._parts)

    def build(self, blocks: Sequence[int], tiles: torch.Tensor) -> None:
        """Build digests of closed blocks.

        Args:
            blocks: their store blocks.
            tiles: ``[len(blocks), layers, heads, block_tokens, 2 * head_dim]``.
        """
        index = list(blocks)
        for pool, part in zip(self._parts, self._build(tiles), strict=True):
            pool[index] = part
        self.claim(blocks)

    def claim(self, blocks: Sequence[int]) -> None:
        """One more user of the digests of these store blocks.

        Who claims without ``build`` writes the rows, or knows that they were written and not
        written over since.
        """
        self._users.update(blocks)

    def layer(self, layer: int) -> torch.Tensor | Keys4:
        """Rows of one layer: min/max ``[capacity, heads, 2, head_dim]``, or 4-bit keys. Views."""
        parts = [part[:, layer] for part in self._parts]
        return parts[0] if self.kind == "minmax" else Keys4(*parts)

    def release(self, blocks: Sequence[int]) -> None:
        """One user less; a digest without users is forgotten, its row stays as it is."""
        missing = [block for block in blocks if not self._users[block]]
        if missing:
            raise StateError(f"store blocks {sorted(missing)} have no digest to release")
        self._users.subtract(blocks)
        for block in blocks:
            if not self._users[block]:
                del self._users[block]

    def logits(self, queries: torch.Tensor, blocks: torch.Tensor, scale: float) -> torch.Tensor:
        """Score blocks for all layers of one request.

        Args:
            queries: ``[layers, lookahead queries, query heads, head_dim]``.
            blocks: int64 ``[n]`` store blocks that have a digest.
            scale: softmax scale of the model's attention.

        Returns:
            ``[layers, lookahead queries, query heads, n]`` float32.
        """
        rows = tuple(part[blocks].transpose(0, 1) for part in self._parts)
        return self._logits(queries, rows, scale)

    def _logits(
        self, queries: torch.Tensor, rows: tuple[torch.Tensor, ...], scale: float
    ) -> torch.Tensor:
        if self.kind == "minmax":
            return minmax_logits(queries, rows[0], self._mix, scale)
        return keys4_logits(queries, Keys4(*rows), scale)

    def _build(self, tiles: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.kind == "minmax":
            return (build_minmax(tiles),)
        return tuple(build_keys4(tiles))
