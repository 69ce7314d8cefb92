"""What every store offers: room for closed blocks, writes, reads, and word of their completion."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from oasiskv.core.geometry import KVGeometry


@dataclass(frozen=True)
class Ticket:
    """Names one write or one transfer; its completion carries the same ticket.

    Args:
        kind: ``write`` (fast tier -> store) or ``read`` (store -> slots, a transfer).
        request_id: the request it belongs to.
        generation: the request's generation; a request id used again gets a new one.
        step: the request's step that asked for it.
        layer: sparse layer of a transfer; -1 for a write, which covers all layers.
    """

    kind: Literal["write", "read"]
    request_id: str
    generation: int
    step: int
    layer: int = -1


class Store(ABC):
    """The tier that holds every closed block.

    A block in the store is known by an index in ``range(capacity_blocks)``, handed out by
    ``reserve`` and given back by ``free``; the caller frees a block only when no write or transfer
    that names it is outstanding. Completions may come in any order.
    """

    geometry: KVGeometry
    capacity_blocks: int

    @property
    @abstractmethod
    def free_blocks(self) -> int:
        """Blocks that ``reserve`` can still hand out."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that the store occupies in its tier, measured from its memory."""

    @abstractmethod
    def reserve(self, count: int) -> list[int]:
        """Take ``count`` blocks.

        Raises:
            StoreFullError: fewer are free; nothing was taken.
        """

    @abstractmethod
    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back.

        Raises:
            StateError: a block was not reserved; nothing was freed.
        """

    @abstractmethod
    def write(self, ticket: Ticket, blocks: Sequence[int], tiles: torch.Tensor) -> None:
        """Start to copy closed blocks into the store.

        Args:
            ticket: comes back from ``poll`` once the store holds the blocks.
            blocks: reserved store blocks.
            tiles: ``[len(blocks), layers, heads, block_tokens, 2 * head_dim]``; must stay unchanged
                until the ticket is back.
        """

    @abstractmethod
    def read(
        self,
        ticket: Ticket,
        source_index: torch.Tensor,
        dest: torch.Tensor,
        dest_index: torch.Tensor,
    ) -> int:
        """Start a transfer of layer ``ticket.layer``: store tiles -> slots.

        Args:
            ticket: comes back from ``poll`` once every tile is in its slot.
            source_index: int64 ``[heads, n]`` store blocks, -1 where there is nothing to do.
            dest: ``[blocks, heads, block_tokens, 2 * head_dim]``, one layer of the fast tier.
            dest_index: int64 ``[heads, n]`` blocks of ``dest``, -1 beside the -1 of the source.

        Returns:
            Bytes that the transfer moves.
        """

    def damaged(self, ticket: Ticket) -> torch.Tensor | None:
        """Tiles of a completed transfer that did not get to their slots, being damaged.

        Returns:
            bool ``[heads, n]`` beside the indices of ``read``; None where all are in their slots,
            where nobody checks, or where it was asked before.
        """
        return None

    @abstractmethod
    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        """Completions since the last call; waits up to ``timeout_s`` for one if there is none."""
