"""Faults in the host store of engines of the vLLM plugin, in this process, on the CPU."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from oasiskv.core.geometry import KVGeometry
from oasiskv.testing.faulty_store import FaultyStore
from oasiskv.vllm import store


class FaultyAssignedStore(FaultyStore, store.AssignedStore):
    """A worker's host store, with the faults of ``FaultyStore``."""


@contextmanager
def faulty_stores(**faults: Any) -> Iterator[list[FaultyAssignedStore]]:  # noqa: ANN401
    """Engines that start inside have host stores with faults, where requests go one by one.

    That is on the CPU; an engine core in a process of its own must be forked from this one.

    Args:
        faults: of ``FaultyStore``, but for the sizes.

    Yields:
        The stores, one a model, as they are made.
    """
    made: list[FaultyAssignedStore] = []

    def make(geometry: KVGeometry, blocks: int, checksums: bool) -> FaultyAssignedStore:
        made.append(FaultyAssignedStore(geometry, blocks, checksums=checksums, **faults))
        return made[-1]

    before, store.MAKE_STORE = store.MAKE_STORE, make
    try:
        yield made
    finally:
        store.MAKE_STORE = before
