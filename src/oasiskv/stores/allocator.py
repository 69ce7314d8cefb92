"""Which blocks of a store are free."""

from collections.abc import Sequence

from oasiskv.errors import StateError, StoreFullError


class BlockAllocator:
    """Hands out block indices below ``capacity_blocks``, lowest first on a fresh store.

    Args:
        capacity_blocks: blocks there are.
        block_bytes: size of one, for the message of a full store.
    """

    def __init__(self, capacity_blocks: int, block_bytes: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._block_bytes = block_bytes
        self._free = list(range(capacity_blocks - 1, -1, -1))
        self._reserved: set[int] = set()

    @property
    def free_blocks(self) -> int:
        """Blocks that ``reserve`` can still hand out."""
        return len(self._free)

    def reserve(self, count: int) -> list[int]:
        """Take ``count`` blocks.

        Raises:
            StoreFullError: fewer are free; nothing was taken.
        """
        if count > len(self._free):
            raise StoreFullError(
                f"the host store is full: {count} more blocks are needed, {len(self._free)} of "
                f"{self.capacity_blocks} are free; raise host_gib (one block is "
                f"{self._block_bytes} bytes) or run fewer requests"
            )
        blocks = [self._free.pop() for _ in range(count)]
        self._reserved.update(blocks)
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back.

        Raises:
            StateError: a block was not reserved, or comes twice; nothing was freed.
        """
        strangers = set(blocks) - self._reserved
        if strangers or len(set(blocks)) != len(blocks):
            raise StateError(f"blocks {sorted(strangers) or list(blocks)} are not reserved once")
        self._reserved.difference_update(blocks)
        self._free.extend(blocks)
