"""Completions of the host store that never come: the end of one request, and of no other."""

from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.errors import TransferError
from oasiskv.testing.in_vllm import faulty_stores
from plugin.driver import Driver
from plugin.probe import is_greedy, probed
from tiny import prompt_of

SMALL = {"budget_tokens": 32, "hot_tokens": 32, "cap_fraction": 1.0, "hysteresis": 1.0}


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@contextmanager
def losing(folder, kind, settings, **engine_args):
    """An engine whose store loses what it has to do for some requests, and these, by vLLM's id."""
    unlucky = set()
    settings = {"threshold_tokens": 100, "transfer_timeout_s": 0.2} | settings
    with (
        faulty_stores(lose=lambda ticket: ticket.kind == kind and ticket.request_id in unlucky),
        probed(folder, False, settings, **engine_args) as probe,
    ):
        yield Driver(probe), unlucky


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_lost_completion_fails_its_request_and_no_other(tiny_folder, model, kind):
    with losing(tiny_folder, kind, SMALL, num_gpu_blocks_override=160) as (driver, unlucky):
        driver.add("twin", prompt_of(150), 10)
        driver.step()
        # Their first blocks are the twin's too.
        for name in ("unlucky", "unlucky again"):
            driver.add(name, prompt_of(180), 100)
            unlucky.add(driver.requests[name].request_id)
        driver.add("lucky", prompt_of(60), 30)
        driver.finish()
        assert driver.failed == {"unlucky", "unlucky again"}
        assert set(driver.done) == {"twin", "lucky"}
        assert len(driver.done["twin"]) == 10
        assert is_greedy(model, driver.prompts["lucky"], driver.done["lucky"])
        # What they had is kept, since some of it may yet be written, and only that.
        probe = driver.probe
        assert set(probe.state.held) == unlucky
        held = probe.state.held.values()
        slots = {block.block_id for left in held for block in left.slots}
        assert len(slots) == 2 * 2
        assert probe.used == len(slots)
        stored = {block for left in held for block in left.store_blocks}
        store = probe.state.store
        assert store.capacity_blocks - store.free_blocks == len(stored)
        driver.add("after", prompt_of(90), 9)
        driver.finish()
        assert is_greedy(model, driver.prompts["after"], driver.done["after"])


@pytest.mark.smoke
def test_what_a_failed_request_has_stored_is_nobodys_prefix(tiny_folder):
    with losing(tiny_folder, "write", {}) as (driver, unlucky):
        driver.add("unlucky", prompt_of(200), 20)
        unlucky.add(driver.requests["unlucky"].request_id)
        driver.finish()
        assert driver.failed == {"unlucky"}
        assert driver.probe.state.store.kept_blocks == 0


def test_when_what_was_lost_leaves_no_room_the_engine_says_so(tiny_folder):
    # The store holds one request of max_model_len.
    settings = {"host_gib": 0.00035}
    with losing(tiny_folder, "write", settings, max_model_len=336) as (driver, unlucky):
        driver.add("unlucky", prompt_of(200), 20)
        unlucky.add(driver.requests["unlucky"].request_id)
        driver.add("waits", prompt_of(200), 20)
        with pytest.raises(TransferError, match=r"yet be written.*timeout_s=0\.2; .*start"):
            driver.finish(most=10**6)
        assert driver.failed == {"unlucky"}
