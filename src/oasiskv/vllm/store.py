"""The host store of a worker, whose blocks the scheduler hands out."""

from collections.abc import Callable, Sequence

from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import StoreFullError
from oasiskv.stores.host import HostStore
from oasiskv.vllm.logs import logger


class AssignedStore(HostStore):
    """A host store that takes the blocks it is told to, the same in every worker.

    Attributes:
        assigned: store blocks of the request at hand, consumed from the front.
    """

    def __init__(self, geometry: KVGeometry, capacity_blocks: int, checksums: bool = False) -> None:
        super().__init__(geometry, capacity_blocks, checksums)
        self.assigned: list[int] = []
        if self.memory is not None:
            logger.info("OasisKV's host store: %s", self.memory)

    def reserve(self, count: int) -> list[int]:
        """Take the next ``count`` blocks that the scheduler assigned.

        Raises:
            StoreFullError: it assigned fewer.
        """
        if count > len(self.assigned):
            raise StoreFullError(
                f"the scheduler assigned {len(self.assigned)} store blocks where {count} are needed"
            )
        taken, self.assigned[:count] = self.assigned[:count], []
        return taken

    def free(self, blocks: Sequence[int]) -> None:
        """The scheduler keeps count; nothing to do here."""


MAKE_STORE: Callable[[KVGeometry, int, bool], AssignedStore] = AssignedStore
"""What makes the store of requests that are tiered one by one: tests put one with faults here."""
