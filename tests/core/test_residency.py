"""The resident map: what fills it, what a plan changes, and which offences ``check`` finds."""

import pytest
import torch

from oasiskv.core.geometry import KVGeometry
from oasiskv.core.residency import ResidentMap
from oasiskv.errors import StateError

LAYERS, HEADS, SLOTS = 2, 3, 4
GEOMETRY = KVGeometry(LAYERS, HEADS, HEADS, 8)
FIRST, END = 2, 9
"""Blocks before 2 are sinks, blocks from 9 on are in the window."""


def empty_map():
    return ResidentMap(GEOMETRY, SLOTS, torch.device("cpu"))


def filled_map(count=3):
    """Each layer and head its own blocks, all in 2..8."""
    residents = empty_map()
    generator = torch.Generator().manual_seed(count)
    blocks = torch.rand((LAYERS, HEADS, END - FIRST), generator=generator).argsort(dim=-1)
    wanted = torch.zeros((LAYERS, HEADS, count), dtype=torch.bool)
    wanted[..., 1:] = True
    residents.fill(blocks[..., :count] + FIRST, wanted, step=7)
    return residents


def test_a_new_map_is_empty():
    residents = empty_map()
    assert residents.filled == 0
    assert residents.blocks.shape == (LAYERS, HEADS, SLOTS)
    assert bool((residents.blocks == -1).all())
    assert bool((residents.last_wanted == -1).all())
    residents.check(FIRST, END)


@pytest.mark.parametrize("count", [0, 1, 3, SLOTS])
def test_fill_takes_the_first_slots(count):
    residents = empty_map()
    blocks = torch.arange(FIRST, FIRST + count).expand(LAYERS, HEADS, count)
    residents.fill(blocks, torch.ones_like(blocks, dtype=torch.bool), step=3)
    assert residents.filled == count
    assert torch.equal(residents.blocks[..., :count], blocks)
    assert bool((residents.blocks[..., count:] == -1).all())
    residents.check(FIRST, END)


def test_fill_dates_only_wanted_blocks():
    residents = filled_map()
    assert residents.last_wanted.unique(dim=0).unique(dim=1).flatten().tolist() == [-1, 7, 7, -1]


def test_append_takes_the_next_slot_in_every_layer_and_head():
    residents = filled_map(3)
    before = residents.blocks.clone()
    assert residents.append(block=END, step=8) == 3
    assert residents.filled == 4
    assert bool((residents.blocks[..., 3] == END).all())
    assert bool((residents.last_wanted[..., 3] == 8).all())
    assert torch.equal(residents.blocks[..., :3], before[..., :3])
    residents.check(FIRST, END + 1)


def test_append_to_a_full_map_is_refused_and_changes_nothing():
    residents = filled_map(SLOTS)
    before = residents.blocks.clone()
    with pytest.raises(StateError, match="no free slot for block 9: all 4 are filled"):
        residents.append(block=9, step=8)
    assert torch.equal(residents.blocks, before)
    assert residents.filled == SLOTS


def test_commit_puts_each_source_in_its_victim_and_skips_padding():
    residents = empty_map()
    residents.fill(
        torch.tensor([2, 3, 4, 5]).expand(LAYERS, HEADS, SLOTS),
        torch.ones((LAYERS, HEADS, SLOTS), dtype=torch.bool),
        step=1,
    )
    sources = torch.tensor([[6, 7], [8, -1], [-1, -1]])
    victims = torch.tensor([[3, 0], [2, -1], [-1, -1]])
    dates = torch.arange(HEADS * SLOTS).reshape(HEADS, SLOTS)
    residents.commit(1, sources, victims, dates)
    assert residents.blocks[1].tolist() == [[7, 3, 4, 6], [2, 3, 8, 5], [2, 3, 4, 5]]
    assert torch.equal(residents.last_wanted[1], dates)
    residents.check(FIRST, END)


def test_commit_changes_no_other_layer():
    residents = filled_map(SLOTS)
    before = residents.blocks[0].clone(), residents.last_wanted[0].clone()
    source = torch.tensor([[20]] * HEADS)
    residents.commit(1, source, torch.zeros_like(source), torch.full((HEADS, SLOTS), 99))
    assert torch.equal(residents.blocks[0], before[0])
    assert torch.equal(residents.last_wanted[0], before[1])


def test_check_accepts_the_same_block_in_other_layers_and_heads():
    residents = empty_map()
    blocks = torch.tensor([3, 2, 8]).expand(LAYERS, HEADS, 3)
    residents.fill(blocks, torch.ones_like(blocks, dtype=torch.bool), step=1)
    residents.check(FIRST, END)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("head", range(HEADS))
def test_check_finds_a_block_in_two_slots(layer, head):
    residents = filled_map()
    residents.blocks[layer, head, 2] = residents.blocks[layer, head, 0].clone()
    with pytest.raises(StateError, match="in two slots of the same layer and head"):
        residents.check(FIRST, END)


@pytest.mark.parametrize("block", [0, FIRST - 1, END, END + 3, -1])
def test_check_finds_a_block_of_the_sink_or_the_window_and_names_it(block):
    residents = filled_map()
    residents.blocks[1, 0, 1] = block
    with pytest.raises(StateError, match=rf"outside 2\.\.8: \[{block}\]$"):
        residents.check(FIRST, END)


def test_check_finds_a_block_past_the_filled_slots():
    residents = filled_map(3)
    residents.blocks[0, 2, 3] = FIRST
    with pytest.raises(StateError, match="past the 3 filled ones"):
        residents.check(FIRST, END)


def test_check_finds_an_offence_in_a_full_map():
    residents = filled_map(SLOTS)
    residents.check(FIRST, END)
    residents.blocks[0, 0, SLOTS - 1] = residents.blocks[0, 0, 0].clone()
    with pytest.raises(StateError):
        residents.check(FIRST, END)
