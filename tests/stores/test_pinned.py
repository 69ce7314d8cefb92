"""Pinned memory: exact, populated, pinned in pieces, and nothing left of it afterwards."""

import ctypes
import gc
import mmap
import os
import resource
import threading
from pathlib import Path

import pytest
import torch

from oasiskv.errors import ConfigError
from oasiskv.stores.pinned import PinnedMemory

MIB = 2**20
GIB = 2**30
LIBC = ctypes.CDLL(None, use_errno=True)


def resident(address, nbytes):
    """Share of a range that has memory behind it."""
    units = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * units)()
    assert LIBC.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), found) == 0
    return sum(unit & 1 for unit in found) / units


def is_mapped(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(text, 16) for text in line.split()[0].split("-"))
        if first <= address < last:
            return True
    return False


class FakePinner:
    """Keeps count; refuses from the ``most``-th piece on."""

    def __init__(self, most=10**9):
        self.most = most
        self.pinned, self.cpus, self.entered, self.events = {}, set(), set(), []
        self.least_resident, self.asked = 1.0, 0
        self._lock = threading.Lock()

    def enter_thread(self):
        self.entered.add(threading.get_ident())

    def register(self, address, nbytes):
        assert threading.get_ident() in self.entered
        assert address % mmap.PAGESIZE == 0
        share = resident(address, nbytes)
        with self._lock:
            self.asked += 1
            self.cpus |= os.sched_getaffinity(0)
            self.least_resident = min(self.least_resident, share)
            if len(self.pinned) == self.most:
                return "out of memory (CUDA error 2)"
            self.pinned[address] = nbytes
        return None

    def unregister(self, address):
        self.events.append("unpin")
        if self.pinned.pop(address, None) is None:
            return "invalid argument (CUDA error 1)"
        return None

    def settle(self):
        self.events.append("settle")


@pytest.mark.parametrize("nbytes", [1, 4096, 4097, 3 * MIB + 5])
def test_size_is_exact(nbytes):
    pinner = FakePinner()
    memory = PinnedMemory(nbytes, 1, pinner)
    assert memory.tensor.shape == (nbytes,)
    assert memory.tensor.untyped_storage().nbytes() == nbytes
    assert sum(pinner.pinned.values()) == -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory.tensor[-1] = 7
    assert int(memory.tensor[-1]) == 7
    memory.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_pieces_cover_all_and_split_no_unit(threads, monkeypatch):
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cpus: None)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    pinner, seen = FakePinner(), []
    unit = 3 * 2**12 + 2**10
    memory = PinnedMemory(
        1000 * unit, unit, pinner, report=seen.append, most_threads=threads, piece_bytes=2 * MIB
    )
    assert memory.threads == threads
    assert len(pinner.entered) <= threads
    pieces = sorted(pinner.pinned.items())
    end = memory.tensor.data_ptr()
    for address, nbytes in pieces:
        assert address == end
        assert (address - memory.tensor.data_ptr()) % unit == 0
        assert nbytes <= 2 * MIB
        end += nbytes
    assert len(pieces) > 5
    assert 0 <= end - memory.tensor.data_ptr() - memory.tensor.nbytes < mmap.PAGESIZE
    assert seen == sorted(seen)
    assert seen[-1] == sum(pinner.pinned.values())
    memory.close()


def test_a_unit_larger_than_a_piece_stays_whole():
    pinner, unit = FakePinner(), MIB + mmap.PAGESIZE
    memory = PinnedMemory(3 * MIB, unit, pinner, piece_bytes=MIB)
    assert sorted(pinner.pinned.values()) == [3 * MIB - 2 * unit, unit, unit]
    memory.close()


def test_populated_before_it_is_pinned_and_zero():
    pinner = FakePinner()
    memory = PinnedMemory(16 * MIB, 4096, pinner, piece_bytes=2 * MIB)
    assert pinner.least_resident == 1.0
    assert int(memory.tensor.max()) == 0
    memory.close()


def test_threads_run_where_they_are_told_and_end():
    allowed = os.sched_getaffinity(0)
    pinner, some = FakePinner(), {min(allowed)}
    PinnedMemory(MIB, 1, pinner, some | {10**4}).close()
    assert pinner.cpus == some
    assert os.sched_getaffinity(0) == allowed
    assert not [thread for thread in threading.enumerate() if "oasiskv" in thread.name]


@pytest.mark.parametrize("cpus", [None, set(), {10**4}])
def test_threads_run_anywhere_where_no_cpu_is_near(cpus):
    pinner = FakePinner()
    PinnedMemory(MIB, 1, pinner, cpus).close()
    assert pinner.cpus == os.sched_getaffinity(0)


@pytest.mark.parametrize("most", [0, 1, 5])
def test_v51080_a_refusal_undoes_everything_and_says_how_much_could_be_had(most):
    pinner = FakePinner(most)
    with pytest.raises(ConfigError) as caught:
        PinnedMemory(16 * MIB, 4096, pinner, piece_bytes=2 * MIB)
    assert pinner.pinned == {}
    assert pinner.events == ["settle", *["unpin"] * most]
    message = str(caught.value)
    assert "needs 0.016 GiB of pinned memory" in message
    assert f"{most * 2 * MIB / GIB:.3f} GiB could be had: out of memory (CUDA error 2)" in message
    assert "lower host_gib" in message
    assert "ulimit -l is" in message


def test_an_interrupted_start_leaves_nothing_behind():
    pinner = FakePinner()

    def interrupt(done):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        PinnedMemory(64 * MIB, 4096, pinner, report=interrupt, piece_bytes=2 * MIB)
    assert pinner.pinned == {}


def test_more_than_is_available_is_refused_before_anything_is_touched():
    pinner = FakePinner()
    with pytest.raises(ConfigError) as caught:
        PinnedMemory(2**50, 4096, pinner)
    assert "needs 1048576.000 GiB" in str(caught.value)
    assert "this is the memory that is available; lower host_gib" in str(caught.value)
    assert pinner.entered == set()


def test_a_mapping_that_the_system_refuses():
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * mmap.PAGESIZE
    resource.setrlimit(resource.RLIMIT_AS, (used + 64 * MIB, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"needs 0\.500 GiB .* Cannot allocate memory; lower"):
            PinnedMemory(512 * MIB, 4096, FakePinner())
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_nothing_more_is_touched_after_a_refusal():
    pinner = FakePinner(2)
    with pytest.raises(ConfigError):
        PinnedMemory(16 * MIB, 4096, pinner, most_threads=1, piece_bytes=2 * MIB)
    assert pinner.asked == 3


def test_close_unpins_and_unmaps_once_nothing_runs():
    pinner = FakePinner()
    memory = PinnedMemory(4 * MIB, 4096, pinner)
    address = memory.tensor.data_ptr()
    assert is_mapped(address)
    memory.close()
    assert pinner.events == ["settle", "unpin"]
    assert pinner.pinned == {}
    assert memory.tensor.nbytes == 0
    assert not is_mapped(address)
    memory.close()
    assert pinner.events == ["settle", "unpin"]


def test_a_view_of_closed_memory_finds_zeros_and_holds_none():
    memory = PinnedMemory(4 * MIB, 4096, FakePinner())
    view = memory.tensor.fill_(5).view(torch.int16)
    memory.close()
    assert resident(view.data_ptr(), 4 * MIB) == 0
    assert int(view.abs().max()) == 0


def test_pinned_as_long_as_a_view_lives():
    pinner = FakePinner()
    view = PinnedMemory(4 * MIB, 4096, pinner).tensor[4096:].view(torch.int32)
    address = view.data_ptr()
    gc.collect()
    assert len(pinner.pinned) == 1
    view[0] = 3
    assert int(view[0]) == 3
    del view
    assert pinner.pinned == {}
    assert pinner.events == ["settle", "unpin"]
    assert not is_mapped(address)


def test_unpinning_that_fails_is_said(caplog):
    pinner = FakePinner()
    memory = PinnedMemory(MIB, 4096, pinner)
    pinner.pinned.clear()
    memory.close()
    assert "host memory stays pinned: unpinning failed: invalid argument" in caplog.text


def test_memory_is_given_back_where_waiting_for_the_gpu_fails():
    pinner = FakePinner()
    memory = PinnedMemory(MIB, 4096, pinner)

    def broken():
        raise RuntimeError("illegal memory access")

    pinner.settle = broken
    with pytest.raises(RuntimeError, match="illegal"):
        memory.close()
    assert pinner.pinned == {}


def test_a_forked_process_does_not_have_it():
    memory = PinnedMemory(MIB, 4096, FakePinner())
    address = memory.tensor.data_ptr()
    child = os.fork()
    if child == 0:
        os._exit(17 if is_mapped(address) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    memory.close()


def test_its_log_line():
    memory = PinnedMemory(64 * MIB, 4096, FakePinner(), most_threads=1)
    assert str(memory).startswith("0.062 GiB pinned in ")
    assert str(memory).endswith("s by 1 threads")
    memory.close()
