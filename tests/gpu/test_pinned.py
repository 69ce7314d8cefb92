"""Pinned memory on a GPU: kernels and copies find its bytes, and nothing stays pinned."""

import logging
import os
import threading
import time

import pytest
import torch

from backends import load_op
from oasiskv.core.geometry import KVGeometry
from oasiskv.errors import ConfigError
from oasiskv.stores.base import Ticket
from oasiskv.stores.host import HostStore
from oasiskv.stores.machine import available_bytes, numa_cpus
from oasiskv.stores.pinned import MOST_THREADS, PinnedMemory
from oasiskv.stores.pinner import CudaPinner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
log = logging.getLogger(__name__)
MIB, GIB = 2**20, 2**30
HEADS, TILE = 4, (16, 256)
BLOCKS = 1000
BLOCK_BYTES = HEADS * 16 * 256 * 2
PIECE = 2 * MIB


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Not here: filling memory would be part of what is timed."""


@pytest.fixture
def pinner():
    torch.cuda.init()
    found = CudaPinner(torch.cuda.current_device())
    if not found.same_address():
        pytest.skip("this system maps registered memory at another address")
    return found


def make(pinner):
    return PinnedMemory(BLOCKS * BLOCK_BYTES, BLOCK_BYTES, pinner, piece_bytes=PIECE)


def blocks_of(memory):
    return memory.tensor.view(torch.bfloat16).view(BLOCKS, HEADS, *TILE)


def random_tiles(seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(BLOCKS, HEADS, *TILE, generator=generator).bfloat16()


def test_where_it_is(pinner):
    address = pinner.pci_address()
    near = numa_cpus(address)
    log.info("GPU at %s, near %s CPUs", address, "any" if near is None else len(near))
    assert address.count(":") == 2


def test_exact_and_pinned_to_its_end(pinner):
    memory = make(pinner)
    assert memory.tensor.untyped_storage().nbytes() == BLOCKS * BLOCK_BYTES
    assert memory.tensor.is_pinned()
    assert all(memory.tensor[at:].is_pinned() for at in (PIECE - 1, PIECE, len(memory.tensor) - 1))
    memory.close()


def test_kernels_read_and_write_all_of_it(pinner):
    memory = make(pinner)
    pool, tiles = blocks_of(memory), random_tiles(0)
    pool.copy_(tiles)
    gather = load_op("gather", "gather_rows", "triton")
    every = torch.arange(BLOCKS, device="cuda").expand(1, HEADS, BLOCKS)
    cache = torch.zeros(BLOCKS, HEADS, *TILE, dtype=torch.bfloat16, device="cuda")
    assert int(gather(pool, every, cache, every.flip(-1))) == HEADS * BLOCKS
    assert torch.equal(cache.cpu(), tiles.flip(0))
    gather(cache, every, pool, every)
    torch.cuda.synchronize()
    assert torch.equal(pool, tiles.flip(0))
    memory.close()


def test_copies_of_whole_blocks(pinner):
    memory = make(pinner)
    pool, tiles = blocks_of(memory), random_tiles(1)
    pool.copy_(tiles)
    copied = torch.stack([block.to("cuda", non_blocking=True) for block in pool])
    assert torch.equal(copied.cpu(), tiles)
    for block, tile in zip(pool, copied.flip(0), strict=True):
        block.copy_(tile, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(pool, tiles.flip(0))
    # A copy over the end of a piece is not promised: this finds out.
    try:
        whole = torch.equal(pool.to("cuda").cpu(), tiles.flip(0))
        log.info("a copy over the ends of pieces is %s", "right" if whole else "WRONG")
    except RuntimeError as error:
        log.info("a copy over the ends of pieces is refused: %s", str(error).splitlines()[0])
    memory.close()


def test_copies_do_not_wait(pinner):
    memory = make(pinner)
    # The first piece: small copies do not wait for the GPU from ordinary memory either.
    part = blocks_of(memory)[: PIECE // BLOCK_BYTES]
    part.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(500_000_000)
    copied = part.to("cuda", non_blocking=True)
    done = torch.cuda.Event()
    done.record()
    assert not done.query()
    torch.cuda.synchronize()
    assert torch.equal(copied.cpu(), part)
    memory.close()


def test_nothing_is_pinned_after_close(pinner):
    memory = make(pinner)
    view = memory.tensor[:PIECE]
    assert view.is_pinned()
    memory.close()
    assert not view.is_pinned()
    assert pinner.register(view.data_ptr(), PIECE) is None
    assert view.is_pinned()
    assert pinner.unregister(view.data_ptr()) is None
    again = make(pinner)
    assert again.tensor.is_pinned()
    again.close()


def test_a_refusal_by_cuda_is_told_and_does_not_reach_the_next_kernel(pinner):
    memory = make(pinner)
    answers = []

    def register_twice():
        pinner.enter_thread()
        answers.append(pinner.register(memory.tensor.data_ptr(), PIECE))

    thread = threading.Thread(target=register_twice)
    thread.start()
    thread.join()
    log.info("registered twice: %s", answers[0])
    assert "CUDA error 712" in answers[0]
    assert int(torch.ones(1, device="cuda").add_(1)) == 2
    memory.close()


class Refusing(CudaPinner):
    """Refuses from the fourth piece on."""

    def __init__(self, device):
        super().__init__(device)
        self.taken, self.unpinned = [], []
        self._lock = threading.Lock()

    def register(self, address, nbytes):
        with self._lock:
            if len(self.taken) == 3:
                return "refused"
            self.taken.append(address)
        return super().register(address, nbytes)

    def unregister(self, address):
        self.unpinned.append((address, super().unregister(address)))
        return self.unpinned[-1][1]


def test_after_a_refusal_nothing_is_pinned(pinner):
    refusing = Refusing(torch.cuda.current_device())
    with pytest.raises(ConfigError, match="could be had: refused"):
        make(refusing)
    assert sorted(refusing.unpinned) == [(address, None) for address in sorted(refusing.taken)]
    make(pinner).close()


def test_the_host_store_is_in_it(pinner):
    geometry = KVGeometry(3, HEADS, HEADS, 128)
    store = HostStore(geometry, 77)
    assert store.pinned
    assert store.memory is not None
    assert store.nbytes == 77 * geometry.block_bytes
    tiles = torch.randn(2, 3, HEADS, *TILE).bfloat16()
    store.write(Ticket("write", "a", 0, 0), store.reserve(2), tiles.cuda())
    assert torch.equal(store.layer(1)[:2], tiles[:, 1])
    assert store.layer(2).is_pinned()
    log.info("host store: %s", store.memory)
    store.close()
    assert store.nbytes == 0


def test_speed(pinner):
    nbytes = 8 * GIB
    if available_bytes() < 2 * nbytes:
        pytest.skip("needs 16 GiB of memory")
    near = numa_cpus(pinner.pci_address())
    rows = []
    for threads in (1, MOST_THREADS):
        memory = PinnedMemory(nbytes, BLOCK_BYTES, pinner, near, most_threads=threads)
        start = time.perf_counter()
        took, used = memory.seconds, memory.threads
        memory.close()
        rows.append((f"{used} threads", took, time.perf_counter() - start))
    start = time.perf_counter()
    tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    took = time.perf_counter() - start
    start = time.perf_counter()
    del tensor
    torch._C._host_emptyCache()
    rows.append(("torch.empty", took, time.perf_counter() - start))
    log.info("8 GiB, %d CPUs: pinning GiB/s, seconds, giving back seconds", os.cpu_count())
    for name, took, back in rows:
        log.info("%-12s %6.2f %6.2f %6.2f", name, 8 / took, took, back)
    assert rows[1][1] < rows[2][1]
