"""Streams wait for each other where they must: without each wait, something else is read."""

from types import SimpleNamespace

import pytest
import torch

from batch_world import NAMES, Script, World, at_once, config_of, one_by_one
from oasiskv.vllm.batch_layers import BatchLayers
from oasiskv.vllm.layers import StepTokens

pytestmark = pytest.mark.gpu
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

LONG = 100_000_000
"""Cycles that a stream is held up: some 50 ms, longer than the host takes to enqueue a step."""


def nothing(*args):
    """In place of a wait."""


@pytest.fixture
def slow_aside(monkeypatch):
    """What runs aside starts late."""
    run = BatchLayers._run

    def late(layers, *args):
        torch.cuda._sleep(LONG)
        run(layers, *args)

    monkeypatch.setattr(BatchLayers, "_run", late)


def make_world():
    return World(at_once, config_of("minmax", "held_back"), "cuda", threshold=100)


def same_reads(batch, steps=30):
    """Whether attention reads in each step what it reads where requests are tiered one by one."""
    single = World(one_by_one, config_of("minmax", "held_back"), "cpu", threshold=100)
    script = Script(seed=3)
    drawn, expected = [script.next() for _ in range(steps)], []
    for step in drawn:
        single.step(*step)
        expected.append(single.read)
    compared = 0
    for step, reads in zip(drawn, expected, strict=True):
        batch.step(*step, observed=False)
        for name, tiles in reads.items():
            for mine, theirs in zip(batch.read[name], tiles, strict=True):
                compared += len(theirs)
                if not torch.equal(mine.cpu(), theirs):
                    return False
    assert compared > 100
    return True


@pytest.mark.parametrize("waits", [True, False])
def test_a_layer_waits_for_its_transfer(slow_aside, monkeypatch, waits):
    if not waits:
        monkeypatch.setattr(BatchLayers, "wait", nothing)
    assert same_reads(make_world()) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_v45704_what_runs_aside_waits_for_the_forward(monkeypatch, waits):
    world = make_world()
    world.before_forward = lambda: torch.cuda._sleep(LONG)
    if not waits:
        monkeypatch.setattr(BatchLayers, "_wait_forward", nothing)
    world.step({"first": step_of(world, 64, seed=0)}, {}, observed=False)
    torch.cuda.synchronize()
    stored = world.layers.store.layer(0)[world.store["first"]]
    assert torch.equal(stored, world.caches[0][world.tables["first"]].cpu()) == waits


def step_of(world, count, seed):
    """A step that computes ``count`` tokens of a new request."""
    generator = torch.Generator().manual_seed(seed)
    geometry = world.layers.geometry
    shape = (len(NAMES), count, geometry.num_query_heads, geometry.head_dim)
    queries = torch.randn(shape, generator=generator)
    shape = (len(NAMES), count, geometry.num_kv_heads, 2 * geometry.head_dim)
    values = torch.randn(shape, generator=generator)
    # On the device, so that the host does not wait in the forward.
    return StepTokens(0, count, [], [1]), queries.cuda(), values.cuda()


@pytest.mark.parametrize("waits", [True, False])
def test_a_load_waits_for_what_is_being_stored(slow_aside, monkeypatch, waits):
    world = make_world()
    if not waits:
        monkeypatch.setattr(BatchLayers, "_wait_aside", nothing)
    world.step({"first": step_of(world, 64, seed=0)}, {}, observed=False)
    into = [world.free.pop() for _ in range(4)]
    world.layers.load(list(zip(world.store["first"], into, strict=True)))
    source = world.caches[0][world.tables["first"]]
    assert torch.equal(world.caches[0][into], source) == waits


@pytest.mark.parametrize("waits", [True, False])
def test_a_row_is_taken_once_nothing_is_written_to_it(slow_aside, monkeypatch, waits):
    world = make_world()
    world.step({"first": step_of(world, 64, seed=0)}, {}, observed=False)
    torch.cuda.synchronize()
    if not waits:
        monkeypatch.setattr(BatchLayers, "_wait_aside", nothing)
    world.step({"second": step_of(world, 64, seed=1)}, {}, observed=False)
    row, shared = world.layers.requests["second"].row, list(world.store["first"])
    world.drop("second")
    slots = world.admit("third")
    news = SimpleNamespace(store_blocks=shared, slots=slots, known=len(shared), resume_start=0)
    world.layers.take_news("third", news)
    assert world.layers.requests["third"].row == row
    torch.cuda.synchronize()
    index = world.layers.tiering.state.store_index[row, : len(shared)]
    assert (index.tolist() == shared) == waits
