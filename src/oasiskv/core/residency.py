"""The resident map: which block each slot holds, and when it was last wanted."""

import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import StateError


class ResidentMap:
    """Slot -> block of one sparse request, per layer and KV head.

    Slots are filled from index 0 up, for all layers and heads alike, so that one count tells how
    many may be read.

    Attributes:
        blocks: int64 ``[layers, heads, slots]``, index of the block in the request, -1 if empty.
        last_wanted: int64 ``[layers, heads, slots]``, step that last wanted it, -1 if none did.
        filled: slots that hold a block, the same for every layer and head.
    """

    def __init__(self, geometry: KVGeometry, num_slots: int, device: torch.device) -> None:
        shape = (geometry.num_layers, geometry.num_kv_heads, num_slots)
        self.blocks = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.last_wanted = torch.full(shape, -1, dtype=torch.int64, device=device)
        self.num_slots = num_slots
        self.filled = 0

    def fill(self, blocks: torch.Tensor, wanted: torch.Tensor, step: int) -> None:
        """Fill the first slots of an empty map, as the transition does.

        Args:
            blocks: int64 ``[layers, heads, n]``, n <= slots.
            wanted: bool ``[layers, heads, n]``, which of them ``step`` wants.
            step: the step of the transition.
        """
        count = blocks.shape[-1]
        self.blocks[..., :count] = blocks
        self.last_wanted[..., :count] = torch.where(wanted, step, -1)
        self.filled = count

    def append(self, block: int, step: int) -> int:
        """Put one block, for all layers and heads, in the next free slot; returns the slot."""
        if self.filled == self.num_slots:
            raise StateError(f"no free slot for block {block}: all {self.num_slots} are filled")
        slot = self.filled
        self.blocks[..., slot] = block
        self.last_wanted[..., slot] = step
        self.filled += 1
        return slot

    def commit(
        self,
        layer: int,
        sources: torch.Tensor,
        victims: torch.Tensor,
        last_wanted: torch.Tensor,
    ) -> None:
        """Take over a swap plan of one layer whose transfer is complete.

        Args:
            layer: sparse layer.
            sources: int64 ``[heads, n]`` blocks now in the slots, -1 for none.
            victims: int64 ``[heads, n]`` their slots, -1 for none.
            last_wanted: int64 ``[heads, slots]`` as the plan leaves it.
        """
        head, pair = (victims >= 0).nonzero(as_tuple=True)
        self.blocks[layer, head, victims[head, pair]] = sources[head, pair]
        self.last_wanted[layer] = last_wanted

    def check(self, first: int, end: int) -> None:
        """Every filled slot holds a block of ``range(first, end)``, and no two hold the same.

        Raises:
            StateError: with the first offence found. Run by tests after every step.
        """
        held = self.blocks[..., : self.filled]
        strangers = sorted(set(held[(held < first) | (held >= end)].tolist()))
        if strangers:
            raise StateError(f"slots hold blocks outside {first}..{end - 1}: {strangers}")
        if bool((self.blocks[..., self.filled :] != -1).any()):
            raise StateError(f"a slot past the {self.filled} filled ones holds a block")
        ordered = held.sort(dim=-1).values
        if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
            raise StateError("a block is in two slots of the same layer and head")
