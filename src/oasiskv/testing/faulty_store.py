"""A host store whose completions come late, twice, out of order, from strangers, or never."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.stores.base import Ticket
from oasiskv.stores.host import HostStore


class FaultyStore(HostStore):
    """Copies nothing until the completion is delivered, and delivers by a seed.

    Args:
        geometry: sizes of a block.
        capacity_blocks: blocks of the store.
        seed: drives every choice.
        repeat: chance that a delivered completion comes once more later.
        foreign: chance per poll of a completion that nobody asked for.
        idle: chance that a poll that does not wait delivers nothing.
        late: tells of each ticket, at each poll, whether it cannot be delivered yet.
        lose: tells of each ticket whether it is lost for ever, copy and completion.
        corrupt: tells of each write whether a bit of what it wrote flips in the store.
        checksums: of ``HostStore``.
    """

    def __init__(
        self,
        geometry: KVGeometry,
        capacity_blocks: int,
        seed: int = 0,
        repeat: float = 0.5,
        foreign: float = 0.5,
        idle: float = 0.0,
        late: Callable[[Ticket], bool] = lambda ticket: False,
        lose: Callable[[Ticket], bool] = lambda ticket: False,
        corrupt: Callable[[Ticket], bool] = lambda ticket: False,
        checksums: bool = False,
    ) -> None:
        super().__init__(geometry, capacity_blocks, checksums)
        self._random = random.Random(seed)
        self._repeat = repeat
        self._foreign = foreign
        self._idle = idle
        self._late = late
        self._lose = lose
        self._corrupt = corrupt
        self._pending: list[tuple[Ticket, Callable[[], object]]] = []
        self._again: list[Ticket] = []

    @property
    def pending(self) -> list[Ticket]:
        """Writes and transfers that have not been delivered; lost ones never are."""
        return [ticket for ticket, _ in self._pending]

    def write(self, ticket: Ticket, blocks: Sequence[int], tiles: torch.Tensor) -> None:
        """Note the write; it happens when it is delivered."""

        def carry_out() -> None:
            super(FaultyStore, self).write(ticket, blocks, tiles)
            if self._corrupt(ticket):
                self.flip_a_bit(self._random.choice(blocks))

        self._note(ticket, carry_out)

    def flip_a_bit(self, block: int) -> None:
        """Damage a block in the store, somewhere."""
        data = self._pool[block].view(-1).view(torch.uint8)
        data[self._random.randrange(len(data))] ^= 1 << self._random.randrange(8)

    def read(
        self,
        ticket: Ticket,
        source_index: torch.Tensor,
        dest: torch.Tensor,
        dest_index: torch.Tensor,
    ) -> int:
        """Note the transfer; it happens when it is delivered."""
        self._note(
            ticket,
            lambda: super(FaultyStore, self).read(ticket, source_index, dest, dest_index),
        )
        return int((dest_index >= 0).sum()) * self.geometry.tile_bytes

    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        """Deliver a random few, or at least one if the caller waits."""
        ready = [entry for entry in self._pending if not self._late(entry[0])]
        least = 1 if timeout_s > 0 and ready else 0
        most = max(least, (len(ready) + 1) // 2)
        if self._idle and not least and self._random.random() < self._idle:
            most = 0
        for _ in range(self._random.randint(least, most)):
            entry = ready.pop(self._random.randrange(len(ready)))
            self._pending.remove(entry)
            entry[1]()
        delivered = super().poll()
        repeated, self._again = self._again, []
        self._again = [t for t in delivered if self._random.random() < self._repeat]
        answer = delivered + repeated
        if answer and self._random.random() < self._foreign:
            stranger = self._random.choice(answer)
            answer.append(replace(stranger, generation=stranger.generation + 1000))
            answer.append(replace(stranger, step=stranger.step + 1000))
            answer.append(replace(stranger, request_id="stranger"))
        self._random.shuffle(answer)
        return answer

    def _note(self, ticket: Ticket, carry_out: Callable[[], object]) -> None:
        if not self._lose(ticket):
            self._pending.append((ticket, carry_out))
