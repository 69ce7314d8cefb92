"""Store blocks shared by content: who uses one, and which of those without a user goes first."""

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Sequence

from oasiskv.errors import StateError
from oasiskv.stores.allocator import BlockAllocator


class PrefixBlocks(BlockAllocator):
    """Hands out store blocks, and keeps those whose content may be asked for again.

    A block has users, requests that hold it. When its last user goes, a block whose content was
    published is kept until the room is needed, least recently used first; another is free. A key
    stands for a block's tokens and all before them, such as the engine's own block hash.

    Args:
        capacity_blocks: blocks there are.
        block_bytes: size of one, for the message of a full store.

    Attributes:
        on_unpublished: called with each key under which nothing is found any more.
    """

    def __init__(self, capacity_blocks: int, block_bytes: int) -> None:
        super().__init__(capacity_blocks, block_bytes)
        self.on_unpublished: Callable[[Hashable], None] | None = None
        self._users: Counter[int] = Counter()
        self._block_of: dict[Hashable, int] = {}
        self._key_of: dict[int, Hashable] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free_blocks(self) -> int:
        """Blocks that ``reserve`` can still hand out: free ones, and kept ones without a user."""
        return super().free_blocks + len(self._kept)

    @property
    def kept_blocks(self) -> int:
        """Blocks without a user that are kept for their content."""
        return len(self._kept)

    def reserve(self, count: int) -> list[int]:
        """Take ``count`` blocks, of which the caller is the user.

        Raises:
            StoreFullError: fewer are free or without a user; nothing was taken.
        """
        short = count - super().free_blocks
        if 0 < short <= len(self._kept):
            for _ in range(short):
                self.unpublish(next(iter(self._kept)))
        blocks = super().reserve(count)
        self._users.update(blocks)
        return blocks

    def match(self, keys: Sequence[Hashable]) -> list[int]:
        """Blocks of the longest prefix of ``keys`` that is published; nobody's use changes."""
        found: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            found.append(block)
        return found

    def take(self, blocks: Sequence[int]) -> None:
        """One more user of each of these, which ``match`` has just found.

        Raises:
            StateError: a block is neither in use nor kept.
        """
        for block in blocks:
            if block not in self._kept and not self._users[block]:
                raise StateError(f"block {block} is neither in use nor kept: it cannot be taken")
            self._kept.pop(block, None)
            self._users[block] += 1

    def publish(self, block: int, key: Hashable) -> bool:
        """The store holds what ``key`` stands for in ``block``, which is in use.

        Where another block holds it already, that one stays the one to be found.

        Returns:
            Whether nothing was found under the key before.

        Raises:
            StateError: the block is not in use.
        """
        if not self._users[block]:
            raise StateError(f"block {block} has no user: it cannot be published")
        if block in self._key_of or key in self._block_of:
            return False
        self._key_of[block], self._block_of[key] = key, block
        return True

    def unpublish(self, block: int) -> None:
        """The block is not found any more, if it was; without a user it is free."""
        if block not in self._key_of:
            return
        key = self._key_of.pop(block)
        del self._block_of[key]
        if self.on_unpublished is not None:
            self.on_unpublished(key)
        if block in self._kept:
            del self._kept[block]
            super().free([block])

    def unpublish_all(self) -> None:
        """No block is found any more; those without a user are free."""
        for block in list(self._key_of):
            self.unpublish(block)

    def free(self, blocks: Sequence[int]) -> None:
        """One user less of each of these; the last ones go first, being of less use alone.

        Raises:
            StateError: a block is not in use, or comes twice; nothing was freed.
        """
        if len(set(blocks)) != len(blocks) or not all(self._users[block] for block in blocks):
            raise StateError(f"blocks {list(blocks)} are not in use once each")
        for block in reversed(blocks):
            self._users[block] -= 1
            if not self._users[block]:
                del self._users[block]
                if block in self._key_of:
                    self._kept[block] = None
                else:
                    super().free([block])
