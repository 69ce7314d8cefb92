"""Requests tiered at once do what they do one by one: same choices, same tiles, same slots."""

import pytest
import torch

from batch_world import GEOMETRY, LIMITS, Script, World, at_once, config_of, one_by_one


def assert_same_tiles(batch, single):
    """What attention reads, and which of it is in which slot."""
    assert batch.read.keys() == single.read.keys()
    for name, tiles in single.read.items():
        for mine, theirs in zip(batch.read[name], tiles, strict=True):
            assert torch.equal(mine.cpu(), theirs)


# Past 8: even the sink leaves the window later. Past 100: blocks that leave it fill free slots.
# Past 176: no slot is free.
@pytest.mark.parametrize("threshold", [8, 100, 176])
@pytest.mark.parametrize(
    ("digest", "lookahead", "device"),
    [
        ("keys4", "held_back", "cpu"),
        ("minmax", "last_accepted", "cpu"),
        # Not 4-bit keys: their kernel multiplies in float16, and near-ties change places.
        pytest.param("minmax", "held_back", "cuda", marks=pytest.mark.gpu),
    ],
)
def test_same_choices_and_tiles(device, digest, lookahead, threshold):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    config = config_of(digest, lookahead)
    single = World(one_by_one, config, "cpu", threshold)
    batch = World(at_once, config, device, threshold)
    script = Script(seed=3)
    compared = 0
    for number in range(150):
        steps, dropped = script.next()
        # On CUDA a step that nobody observes is replayed as a graph.
        observed = device == "cpu" or number % 2 == 0
        expected, got = single.step(steps, dropped), batch.step(steps, dropped, observed)
        assert got.keys() == expected.keys()
        assert_same_tiles(batch, single)
        for name, wanted in expected.items():
            assert batch.layers.window_start(name) == single.layers.window_start(name)
            if wanted is None or not observed:
                assert got[name] is None
            else:
                assert torch.equal(got[name].sort(-1).values.cpu(), wanted.sort(-1).values)
                compared += wanted.numel()
    if device == "cuda":
        assert len(batch.layers.take_waits()) > 50
        # An answer may be due that is some steps old; the next one is not.
        torch.cuda.synchronize()
        batch.layers.traffic()
        batch.layers.count_step(())
        torch.cuda.synchronize()
    counted, expected = batch.layers.traffic(), single.layers.traffic()
    assert expected.compared_tiles > expected.agreeing_tiles > 0
    # Nobody compares prediction and query there.
    expected.compared_tiles = expected.agreeing_tiles = 0
    assert counted == expected
    assert counted.wanted_tiles > counted.missed_tiles > counted.fetched_tiles > 500
    state = batch.layers.tiering.state
    assert batch.resumed == single.resumed > 5
    assert compared > (2000 if device == "cpu" else 1000)
    assert int(state.moved_tiles) > 500
    assert int(state.nan_scores) == 0


def test_the_state_takes_what_was_taken_off_for_it():
    config = config_of("keys4", "held_back")
    world = World(at_once, config, "cpu", threshold=8)
    assert world.layers.tiering.state.nbytes == LIMITS.state_bytes(GEOMETRY, config)
