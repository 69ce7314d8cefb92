"""A bit that flips in the host store is noticed with checksums on, and never ends the engine."""

from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.testing.in_vllm import faulty_stores
from plugin.driver import Driver
from plugin.engines import greedy
from plugin.probe import is_greedy, probed
from tiny import prompt_of

SMALL = {"threshold_tokens": 100, "budget_tokens": 32, "hot_tokens": 32}
SMALL |= {"cap_fraction": 1.0, "hysteresis": 1.0, "checksums": True}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@contextmanager
def rotting(folder, settings, corrupt=lambda ticket: False, **engine_args):
    with (
        faulty_stores(corrupt=corrupt) as stores,
        probed(folder, False, settings, **engine_args) as probe,
    ):
        yield Driver(probe), stores[0]


def wrong_tiles(probe, originals):
    """Filled slots whose tile is not the one that was written for the block they are to hold."""
    wrong = seen = 0
    target = probe.runtime.target
    for request in target.running:
        if request.residents is None:
            continue
        for layer, cache in enumerate(target.caches):
            for head, blocks in enumerate(request.residents.blocks[layer].tolist()):
                slots = request.kv.slots.tolist()
                for slot, block in zip(slots, blocks[: request.residents.filled], strict=False):
                    tile = originals[request.store_blocks[block]][layer, head]
                    wrong += not torch.equal(cache[slot, head], tile)
                    seen += 1
    assert seen
    return wrong


@pytest.mark.parametrize("checksums", [True, False])
def test_a_damaged_tile_does_not_get_into_a_slot(tiny_folder, model, checksums):
    """One tile of the four of every block is damaged."""
    settings = SMALL | {"checksums": checksums}
    with rotting(tiny_folder, settings, lambda ticket: True) as (driver, store):
        probe, originals = driver.probe, {}
        note = store.write

        def write(ticket, blocks, tiles):
            originals.update(zip(blocks, tiles.clone(), strict=True))
            note(ticket, blocks, tiles)

        store.write = write
        driver.add("long", prompt_of(300), 120)
        driver.add("short", prompt_of(60), 30)
        driver.step(3)
        wrong = 0
        while driver.engine.has_unfinished_requests() and "long" not in driver.done:
            driver.step()
            target = probe.runtime.target
            target.settle(list(target.requests))
            if target.requests:
                wrong += wrong_tiles(probe, originals)
        assert (wrong == 0) == checksums
        assert len(driver.done["long"]) == 120
        assert is_greedy(model, driver.prompts["short"], driver.done["short"])
        if checksums:
            assert store.checksums.damaged_tiles > 0
        driver.finish()
        greedy(probe.llm, [[1]], 1)
        probe.assert_all_back()


def test_a_damaged_prefix_fails_who_loads_it_and_is_not_found_again(tiny_folder, model):
    prompt = prompt_of(200)
    with rotting(tiny_folder, {"checksums": True}) as (driver, store):
        probe = driver.probe
        greedy(probe.llm, [prompt], 1)
        [damaged] = probe.state.store.match([hash_of(probe, prompt, 5)])
        store.flip_a_bit(damaged)
        assert probe.llm.reset_prefix_cache()
        driver.add("other", prompt_of(150, seed=1), 20)
        driver.step(2)
        # Both find the prefix in one step: one loads it, the other shares vLLM's blocks.
        driver.add("first", prompt, 5)
        driver.add("second", prompt, 5)
        driver.finish()
        assert driver.failed == {"first", "second"}
        assert set(driver.done) == {"other"}
        driver.add("again", prompt, 5)
        driver.finish()
        assert set(driver.done) == {"other", "again"}
        driver.assert_right_and_all_back(model)
        assert probe.llm.reset_prefix_cache()
        driver.add("once more", prompt, 5)
        driver.finish()
        driver.assert_right_and_all_back(model)
        assert store.checksums.damaged_tiles == 1


def hash_of(probe, prompt, block):
    """vLLM's hash of a block of a prompt."""
    driver = Driver(probe)
    driver.add("hashed", prompt, 1)
    [found] = driver.requests["hashed"].block_hashes[block : block + 1]
    driver.abort("hashed")
    return found
