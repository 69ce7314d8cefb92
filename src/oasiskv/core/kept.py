"""What is in the slots of a request that was preempted while sparse, until it comes back."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class KeptSlots:
    """A copy of the resident map, on the host; the tiles are in the store.

    Transfers that were on their way are not in it: their victims hold the blocks of before.

    Args:
        blocks: integer ``[layers, heads, slots]``, block of the request in each slot, -1 for none.
        last_wanted: of the same shape, step that last wanted it, -1 if none did.
        filled: slots that hold a block, the first ones.
        window_start: first block of the window.
    """

    blocks: torch.Tensor
    last_wanted: torch.Tensor
    filled: int
    window_start: int

    @classmethod
    def copy(
        cls, blocks: torch.Tensor, last_wanted: torch.Tensor, filled: int, window_start: int
    ) -> KeptSlots:
        """Copy a resident map, ordered on the current stream; the device is not waited for."""
        return cls(_to_host(blocks), _to_host(last_wanted), filled, window_start)


def _to_host(source: torch.Tensor) -> torch.Tensor:
    kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    return kept.copy_(source, non_blocking=True)
