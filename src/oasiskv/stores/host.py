"""The host store: one pool in host memory, allocated once, pinned where CUDA is there."""

import sys
from collections.abc import Sequence
from contextlib import nullcontext

import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import ConfigError
from oasiskv.models.progress import Report, progress_bar
from oasiskv.ops.gather.reference import gather_tiles
from oasiskv.stores.allocator import BlockAllocator
from oasiskv.stores.base import Store, Ticket
from oasiskv.stores.checksums import TileChecksums
from oasiskv.stores.machine import available_bytes, numa_cpus
from oasiskv.stores.pinned import PinnedMemory
from oasiskv.stores.pinner import CudaPinner

_GIB = 2**30
# A smaller pool is there before a bar is seen.
_BAR_BYTES = 2 * _GIB


class HostStore(Store):
    """Closed blocks in host memory, ``[blocks, layers, heads, block_tokens, 2 * head_dim]``.

    A block is one contiguous range over all layers and heads, so that it can travel as one. Copies
    run on the caller's stream and are complete, in that stream's order, when the call returns.

    Args:
        geometry: sizes of a block.
        capacity_blocks: blocks to allocate, at once; at least 1.
        checksums: keep one of each tile, and leave damaged tiles out of transfers.

    Attributes:
        pinned: whether the pool is pinned.
        memory: the pool's, where it is pinned by us; None where it is PyTorch's.
        checksums: of all tiles; None where none are kept.

    Raises:
        ConfigError: no block fits, or the memory is not to be had.
    """

    def __init__(self, geometry: KVGeometry, capacity_blocks: int, checksums: bool = False) -> None:
        if capacity_blocks < 1:
            raise ConfigError(
                f"host_gib gives a store of {capacity_blocks} blocks: it must hold at least one "
                f"block, {geometry.block_bytes} bytes"
            )
        self.geometry = geometry
        self.capacity_blocks = capacity_blocks
        self.pinned = torch.cuda.is_available()
        shape = (capacity_blocks, geometry.num_layers, geometry.num_kv_heads, *geometry.tile_shape)
        self.memory = _pin(geometry, capacity_blocks) if self.pinned else None
        if self.memory is None:
            _check_room(capacity_blocks * geometry.block_bytes)
            self._pool = torch.empty(shape, dtype=geometry.dtype, pin_memory=self.pinned)
        else:
            self._pool = self.memory.tensor.view(geometry.dtype).view(shape)
        self._blocks = BlockAllocator(capacity_blocks, geometry.block_bytes)
        self._completed: list[Ticket] = []
        self.checksums = TileChecksums(geometry, capacity_blocks) if checksums else None
        self._damaged: dict[Ticket, torch.Tensor] = {}

    @classmethod
    def of_size(cls, geometry: KVGeometry, host_gib: float, checksums: bool = False) -> "HostStore":
        """The largest store of at most ``host_gib`` GiB."""
        return cls(geometry, int(host_gib * 2**30) // geometry.block_bytes, checksums)

    @property
    def free_blocks(self) -> int:
        """Blocks that ``reserve`` can still hand out."""
        return self._blocks.free_blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the pool, from its storage."""
        return self._pool.untyped_storage().nbytes()

    def close(self) -> None:
        """Give the pool back, pinned or not, once the GPU is done; the store has no tile then."""
        self._pool = self._pool.new_empty((0, *self._pool.shape[1:]))
        if self.memory is not None:
            self.memory.close()

    def layer(self, layer: int) -> torch.Tensor:
        """Tiles of one layer, ``[blocks, heads, block_tokens, 2 * head_dim]``: a view."""
        return self._pool[:, layer]

    def reserve(self, count: int) -> list[int]:
        """Take ``count`` blocks, lowest index first on a fresh store."""
        return self._blocks.reserve(count)

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back."""
        self._blocks.free(blocks)

    def write(self, ticket: Ticket, blocks: Sequence[int], tiles: torch.Tensor) -> None:
        """Copy closed blocks into the store; complete on return."""
        if self.checksums is not None:
            self.checksums.note(blocks, tiles)
        self._pool[list(blocks)] = tiles.to(self._pool.device)
        self._completed.append(ticket)

    def read(
        self,
        ticket: Ticket,
        source_index: torch.Tensor,
        dest: torch.Tensor,
        dest_index: torch.Tensor,
    ) -> int:
        """Copy tiles of one layer into slots, but for damaged ones; complete on return."""
        if self.checksums is not None:
            damaged = self.checksums.damaged(self._pool, ticket.layer, source_index)
            if bool(damaged.any()):
                self._damaged[ticket] = damaged
                source_index = source_index.masked_fill(damaged.to(source_index.device), -1)
                dest_index = dest_index.masked_fill(damaged.to(dest_index.device), -1)
        moved = gather_tiles(self._pool[:, ticket.layer], source_index, dest, dest_index)
        self._completed.append(ticket)
        return moved

    def damaged(self, ticket: Ticket) -> torch.Tensor | None:
        """Tiles of a completed transfer that were left out; asked once."""
        return self._damaged.pop(ticket, None)

    def damaged_blocks(self, blocks: Sequence[int]) -> set[int]:
        """Those of these store blocks of which a tile is damaged; none without checksums."""
        if self.checksums is None:
            return set()
        index = torch.tensor(blocks).expand(self.geometry.num_kv_heads, -1)
        for layer in range(self.geometry.num_layers):
            self.checksums.damaged(self._pool, layer, index)
        return self.checksums.damaged_blocks.intersection(blocks)

    def poll(self, timeout_s: float = 0.0) -> list[Ticket]:
        """Completions since the last call; there is never one to wait for."""
        completed, self._completed = self._completed, []
        return completed


def _check_room(nbytes: int) -> None:
    """Refuse what Linux might give, and then kill the process that touches it."""
    available = available_bytes()
    if nbytes > available:
        raise ConfigError(
            f"the host store needs {nbytes / _GIB:.3f} GiB, and {available / _GIB:.3f} GiB of "
            "memory are available: lower host_gib, or the number of tokens"
        )


def _pin(geometry: KVGeometry, blocks: int) -> PinnedMemory | None:
    """Memory of ``blocks`` blocks near the current GPU; None where kernels would not find it."""
    pinner = CudaPinner(torch.cuda.current_device())
    if not pinner.same_address():
        return None
    nbytes = blocks * geometry.block_bytes
    seen = nbytes >= _BAR_BYTES and sys.stderr.isatty()
    quiet: nullcontext[Report] = nullcontext(lambda what, done: None)
    with progress_bar("host store") if seen else quiet as report:
        return PinnedMemory(
            nbytes,
            geometry.block_bytes,
            pinner,
            numa_cpus(pinner.pci_address()),
            lambda done: report(f"{done / _GIB:.1f} of {nbytes / _GIB:.1f} GiB", done / nbytes),
        )
