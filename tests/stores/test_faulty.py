"""The faulty store: completions misbehave, data never does."""

import math
from collections import Counter

import pytest
import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.stores.base import Ticket
from oasiskv.testing.faulty_store import FaultyStore

LAYERS, HEADS, BLOCKS, CAPACITY = 2, 2, 4, 6
GEOMETRY = KVGeometry(LAYERS, HEADS, HEADS, 4, dtype=torch.float32)
SEEDS = range(8)
POLLS = 60
"""More than enough: a poll that waits delivers at least one of what is pending."""


def make_tiles():
    generator = torch.Generator().manual_seed(1)
    return torch.randn((BLOCKS, LAYERS, HEADS, *GEOMETRY.tile_shape), generator=generator)


def make_dest():
    return torch.full((BLOCKS, HEADS, *GEOMETRY.tile_shape), math.nan)


def start_writes(store, tiles):
    """One write per block; returns the tickets."""
    tickets = []
    for step, block in enumerate(store.reserve(BLOCKS)):
        tickets.append(Ticket("write", "a", 0, step))
        store.write(tickets[-1], [block], tiles[step : step + 1])
    return tickets


def start_reads(store, dests):
    """One transfer per layer and block, into the place of the same number."""
    tickets = []
    for layer, dest in enumerate(dests):
        for block in range(BLOCKS):
            tickets.append(Ticket("read", "a", 0, 100 + block, layer))
            index = torch.full((HEADS, 1), block)
            store.read(tickets[-1], index, dest, index)
    return tickets


def poll_all(store, timeout_s=1.0):
    """Completions of many polls, in the order they came."""
    return [ticket for _ in range(POLLS) for ticket in store.poll(timeout_s)]


def assert_equal(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_loss_everything_arrives(seed):
    store, tiles = FaultyStore(GEOMETRY, CAPACITY, seed), make_tiles()
    writes = start_writes(store, tiles)
    assert set(writes) <= set(poll_all(store))
    dests = [make_dest() for _ in range(LAYERS)]
    reads = start_reads(store, dests)
    assert set(reads) <= set(poll_all(store))
    assert not store.pending
    for layer in range(LAYERS):
        assert_equal(dests[layer], tiles[:, layer])


@pytest.mark.parametrize("seed", SEEDS)
def test_data_are_there_as_soon_as_the_completion_is_and_not_before(seed):
    store, tiles = FaultyStore(GEOMETRY, CAPACITY, seed), make_tiles()
    start_writes(store, tiles)
    poll_all(store)
    dests = [make_dest() for _ in range(LAYERS)]
    reads, done = start_reads(store, dests), set()
    for _ in range(POLLS):
        done.update(store.poll(1.0))
        for ticket in reads:
            block, layer = ticket.step - 100, ticket.layer
            arrived = not bool(dests[layer][block].isnan().any())
            assert arrived == (ticket in done)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_repeated_completion_copies_nothing(seed):
    """Whatever is changed once the completion is there stays changed."""
    store, tiles = FaultyStore(GEOMETRY, CAPACITY, seed, repeat=1.0), make_tiles()
    expected, writes, seen = tiles.clone(), start_writes(store, tiles), Counter()
    for _ in range(POLLS):
        for ticket in store.poll(1.0):
            seen[ticket] += 1
            if ticket in writes:
                tiles[ticket.step] = math.nan
    assert [seen[ticket] for ticket in writes] == [2] * BLOCKS

    dest, seen = make_dest(), Counter()
    reads = start_reads(store, [dest])
    for _ in range(POLLS):
        for ticket in store.poll(1.0):
            seen[ticket] += 1
            if ticket in reads and seen[ticket] == 1:
                block = ticket.step - 100
                assert_equal(dest[block], expected[block, 0])
                dest[block] = math.nan
    assert [seen[ticket] for ticket in reads] == [2] * BLOCKS
    assert bool(dest.isnan().all())


def test_without_repeats_and_strangers_each_completion_comes_once():
    store = FaultyStore(GEOMETRY, CAPACITY, repeat=0.0, foreign=0.0)
    writes = start_writes(store, make_tiles())
    assert Counter(poll_all(store)) == Counter(writes)


@pytest.mark.parametrize("seed", SEEDS)
def test_strangers_are_nobodys_tickets(seed):
    store = FaultyStore(GEOMETRY, CAPACITY, seed, repeat=0.0, foreign=1.0)
    writes = start_writes(store, make_tiles())
    came = poll_all(store)
    strangers = [ticket for ticket in came if ticket not in writes]
    assert len(came) == len(strangers) + BLOCKS
    assert {ticket.request_id for ticket in strangers} == {"a", "stranger"}
    assert any(ticket.generation != 0 for ticket in strangers)
    assert any(ticket.step >= 1000 for ticket in strangers)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_lost_never_comes(seed):
    store = FaultyStore(GEOMETRY, CAPACITY, seed, lose=lambda ticket: ticket.step in (1, 102))
    tiles = make_tiles()
    writes = start_writes(store, tiles)
    came = poll_all(store)
    assert [ticket in came for ticket in writes] == [True, False, True, True]
    dest = make_dest()
    reads = start_reads(store, [dest])
    came = poll_all(store)
    assert [ticket in came for ticket in reads] == [True, True, False, True]
    assert not store.pending
    expected = tiles[:, 0].clone()
    # Nobody wrote block 1, and nobody carried block 2.
    expected[[1, 2]] = math.nan
    assert_equal(dest, expected)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_corrupted_write_differs_in_one_bit(seed):
    store = FaultyStore(GEOMETRY, CAPACITY, seed, corrupt=lambda ticket: ticket.step == 2)
    tiles = make_tiles()
    start_writes(store, tiles)
    poll_all(store)
    changed = 0
    for layer in range(LAYERS):
        found = store.layer(layer)[:BLOCKS].contiguous().view(torch.uint8)
        wrong = found ^ tiles[:, layer].contiguous().view(torch.uint8)
        assert not wrong[[0, 1, 3]].any()
        changed += sum(int(byte).bit_count() for byte in wrong[wrong > 0])
    assert changed == 1


def test_what_is_late_waits_and_the_rest_does_not():
    late = {1}
    store = FaultyStore(GEOMETRY, CAPACITY, late=lambda ticket: ticket.step in late)
    writes = start_writes(store, make_tiles())
    assert set(writes) - set(poll_all(store)) == {writes[1]}
    assert store.pending == [writes[1]]
    late.clear()
    assert writes[1] in poll_all(store)


def test_an_idle_store_delivers_to_those_who_wait():
    store = FaultyStore(GEOMETRY, CAPACITY, foreign=0.0, idle=1.0)
    writes = start_writes(store, make_tiles())
    assert poll_all(store, timeout_s=0.0) == []
    assert set(poll_all(store)) == set(writes)


def test_nothing_is_copied_before_a_poll():
    store, dest = FaultyStore(GEOMETRY, CAPACITY), make_dest()
    start_writes(store, make_tiles())
    start_reads(store, [dest])
    assert len(store.pending) == 2 * BLOCKS
    assert bool(dest.isnan().all())


@pytest.mark.parametrize("seed", SEEDS)
def test_a_poll_that_waits_delivers_at_least_one(seed):
    store = FaultyStore(GEOMETRY, CAPACITY, seed)
    start_writes(store, make_tiles())
    while store.pending:
        before = len(store.pending)
        assert store.poll(timeout_s=0.1)
        assert len(store.pending) < before


def test_a_read_tells_the_bytes_that_it_will_move():
    store, dest = FaultyStore(GEOMETRY, CAPACITY), make_dest()
    index = torch.tensor([[0, 2, -1], [1, -1, -1]])
    assert store.read(Ticket("read", "a", 0, 0, 0), index, dest, index) == 3 * GEOMETRY.tile_bytes


def play(seed):
    store = FaultyStore(GEOMETRY, CAPACITY, seed)
    start_writes(store, make_tiles())
    polls = [store.poll(step % 2) for step in range(20)]
    start_reads(store, [make_dest()])
    return polls + [store.poll(step % 2) for step in range(20)]


def test_a_seed_gives_the_same_disturbance_again():
    assert [play(seed) for seed in SEEDS] == [play(seed) for seed in SEEDS]


def test_seeds_differ():
    assert len({str(play(seed)) for seed in SEEDS}) == len(SEEDS)


def test_writes_come_late_and_later_ones_may_come_first():
    overtaken = 0
    for seed in SEEDS:
        store = FaultyStore(GEOMETRY, CAPACITY, seed, repeat=0.0, foreign=0.0)
        writes = start_writes(store, make_tiles())
        polls = [store.poll(1.0) for _ in range(POLLS)]
        assert len(polls[0]) < BLOCKS
        came = [next(i for i, poll in enumerate(polls) if ticket in poll) for ticket in writes]
        overtaken += came != sorted(came)
    assert overtaken
