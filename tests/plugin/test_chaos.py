"""Completions of the host store come late, twice, out of order and from strangers, in vLLM."""

import random

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.testing.in_vllm import faulty_stores
from plugin.driver import Driver
from plugin.probe import NGRAM, probed
from tiny import prompt_of


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.mark.parametrize(("seed", "drafts"), [(0, None), (1, NGRAM)], ids=["no drafts", "drafts"])
def test_v47282_completions_of_all_kinds_change_no_token(tiny_folder, model, seed, drafts):
    """With forced refetches into slots that are read in the same step, aborts and preemptions."""
    draw = random.Random(seed)
    pool = {"num_gpu_blocks_override": 45, "max_model_len": 190, "max_num_batched_tokens": 64}
    settings = {"threshold_tokens": 116, "hot_tokens": 160, "checksums": True}
    with (
        faulty_stores(seed=seed, idle=0.95) as stores,
        probed(tiny_folder, settings=settings, speculative_config=drafts, **pool) as probe,
    ):
        driver, aborted, held = Driver(probe), set(), 0
        for index in range(16):
            length = draw.choice([draw.randint(1, 60), draw.randint(95, 125)])
            driver.add(str(index), prompt_of(length, seed=index), draw.randint(1, 60))
            driver.step(draw.randint(0, 3))
            if draw.random() < 0.3:
                name = draw.choice(sorted(driver.requests.keys() - driver.done.keys()))
                driver.abort(name)
                aborted.add(name)
            held += len(probe.state.held)
        while driver.engine.has_unfinished_requests():
            driver.step()
            held += len(probe.state.held)
        assert driver.done.keys() == driver.requests.keys() - aborted
        assert len(probe.sparse) > 3
        assert sum(driver.preemptions()) > 0
        assert held > 0
        assert probe.runtime.target.tiering.ignored > 0
        driver.drain()
        assert not stores[0].pending
        assert stores[0].checksums.damaged_tiles == 0
        driver.assert_right_and_all_back(model)
