"""Pinned memory of an exact size, populated and pinned by several threads.

Most of the time goes into finding and clearing the memory, which threads share. What is left for
CUDA is about 0.1 s a GiB, one call at a time, beside the other threads' clearing.
"""

import ctypes
import logging
import math
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack

import torch

from oasiskv.stores.mapping import map_memory, not_so_much
from oasiskv.stores.pinner import Pinner

_GIB = 2**30
# Drivers from 580 on refuse 512 GiB and more in one call. Small pieces also keep all threads busy,
# move the bar, and tell after a refusal how much could be had.
PIECE_BYTES = 2**28
MOST_THREADS = 8

logger = logging.getLogger(__name__)


class PinnedMemory:
    """Host memory that the GPU reads and writes; pinned, and zero, once the constructor is done.

    It stays pinned until ``close`` or until no tensor is over it any more. Where the process ends
    before, the system takes it back.

    Args:
        nbytes: size, at least 1.
        unit_bytes: memory is pinned in pieces of whole units. A copy of PyTorch's (not a kernel)
            from one piece into the next may be refused by CUDA; one within a unit never is.
        pinner: pins.
        cpus: where the threads run, so that the memory is on these CPUs' NUMA node while there is
            room; None: anywhere.
        report: called with bytes that are pinned, from the calling thread.
        most_threads: most threads.
        piece_bytes: most bytes of a piece, unless a unit is larger.

    Attributes:
        tensor: uint8 ``[nbytes]``; empty once closed.
        threads: threads that populated and pinned.
        seconds: what that took.

    Raises:
        ConfigError: not as much is to be had, or to be pinned; nothing stays behind.
    """

    def __init__(
        self,
        nbytes: int,
        unit_bytes: int,
        pinner: Pinner,
        cpus: Set[int] | None = None,
        report: Callable[[int], None] = lambda done: None,
        most_threads: int = MOST_THREADS,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        start = time.perf_counter()
        # The CPUs of a container may be all on another node.
        allowed = os.sched_getaffinity(0)
        self._cpus = (allowed & cpus if cpus else set()) or allowed
        self.threads = min(most_threads, len(self._cpus))
        self._pinner = pinner
        self._registered: dict[int, int] = {}
        mapping = map_memory(nbytes)
        # The tensor's storage keeps this object alive, and this object the mapping. It dies first,
        # so that nothing is unmapped before it is unpinned.
        owner = (ctypes.c_char * nbytes).from_buffer(mapping)
        self._release = weakref.finalize(owner, _release, pinner, self._registered, mapping)
        self._release.atexit = False
        self.tensor = torch.frombuffer(owner, dtype=torch.uint8)
        with ExitStack() as undo:
            undo.callback(self.close)
            step = math.lcm(unit_bytes, mmap.PAGESIZE)
            step *= max(1, piece_bytes // step)
            self._pin(ctypes.addressof(owner), len(mapping), step, report)
            undo.pop_all()
        self.seconds = time.perf_counter() - start

    def __str__(self) -> str:
        size = self.tensor.nbytes / _GIB
        return f"{size:.3f} GiB pinned in {self.seconds:.2f} s by {self.threads} threads"

    def close(self) -> None:
        """Unpin and give the memory back, once the GPU is done; more calls do nothing.

        A view that is still held finds zeros, on the host; kernels must not use it.
        """
        try:
            self._release()
        finally:
            self.tensor = torch.empty(0, dtype=torch.uint8)

    def _pin(self, address: int, size: int, step: int, report: Callable[[int], None]) -> None:
        """Populate and pin ``size`` bytes from ``address`` on, ``step`` bytes a piece."""
        refusals: list[str] = []
        stop = threading.Event()

        def pin_piece(start: int) -> None:
            if stop.is_set():
                return
            length = min(step, size - start)
            # Lets other Python threads run, as registering does.
            ctypes.memset(address + start, 0, length)
            refusal = self._pinner.register(address + start, length)
            if refusal is None:
                self._registered[address + start] = length
            else:
                refusals.append(refusal)
                stop.set()

        with ThreadPoolExecutor(self.threads, "oasiskv-pin", self._enter_thread) as threads:
            try:
                pieces = [threads.submit(pin_piece, start) for start in range(0, size, step)]
                for piece in as_completed(pieces):
                    piece.result()
                    report(sum(list(self._registered.values())))
            finally:
                stop.set()
        if refusals:
            raise not_so_much(size, sum(self._registered.values()), refusals[0])

    def _enter_thread(self) -> None:
        os.sched_setaffinity(0, self._cpus)  # Of this thread only.
        self._pinner.enter_thread()


def _release(pinner: Pinner, registered: dict[int, int], mapping: mmap.mmap) -> None:
    try:
        pinner.settle()
    finally:
        for address in registered:
            failure = pinner.unregister(address)
            if failure is not None:
                logger.warning("host memory stays pinned: unpinning failed: %s", failure)
        # Whoever still holds a view keeps the addresses, not the memory.
        mapping.madvise(mmap.MADV_DONTNEED)
