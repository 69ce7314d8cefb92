"""Two tensor-parallel ranks: the tokens of one, whatever happens, and everything back in each."""

import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from plugin.driver import Driver
from plugin.engines import greedy
from plugin.leftovers import mapped, processes
from plugin.probe import NGRAM, is_greedy, probed
from plugin.ranks import ranked
from plugin.test_killed import PATIENCE_S, TESTS, generating
from tiny import prompt_of
from tiny_folder import save_tiny

GIB = 2**30
# Two layers of one KV head of 32 in float32: what a rank holds of a block.
BLOCK_BYTES = 16 * 2 * 32 * 4 * 2
CAPACITY = GIB // 16 // 2 // BLOCK_BYTES
"""Blocks of half of the store that the tests ask for."""


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


def test_few_slots_give_the_tokens_of_one_rank(tiny_folder):
    """Each KV head fills its own slots with its own blocks, in whatever rank it is."""
    settings = {"threshold_tokens": 100, "budget_tokens": 32, "hot_tokens": 64}
    settings |= {"lookahead": "held_back", "cap_fraction": 0.5}
    prompts = [prompt_of(length) for length in (150, 300, 400)]
    with probed(tiny_folder, False, settings, speculative_config=NGRAM) as probe:
        expected = greedy(probe.llm, prompts, 20)
        assert len(probe.sparse) == 3
    with ranked(tiny_folder, False, settings, speculative_config=NGRAM) as probe:
        assert greedy(probe.llm, prompts, 20) == expected
        assert len(probe.sparse) == 3
        assert all(probe.given_back[name] for name in probe.sparse)
        greedy(probe.llm, [[1]], 1)
        probe.assert_all_back()


class TestExact:
    """All scenarios in which tokens are exact, in one engine: four query and two KV heads."""

    @pytest.fixture(scope="class")
    @classmethod
    def probe(cls, tiny_folder, model):
        with ranked(
            tiny_folder,
            settings={"lookahead": "held_back", "threshold_tokens": 100, "transfer_timeout_s": 2},
            speculative_config=NGRAM,
            num_gpu_blocks_override=150,
            max_num_batched_tokens=128,
        ) as probe:
            yield probe

    def test_each_rank_has_half_of_the_host_store_and_the_same_blocks(self, probe):
        ranks = probe.ranks()
        assert len({rank["process"] for rank in ranks} - {os.getpid()}) == 2
        assert [rank["kv_heads"] for rank in ranks] == [[1], [1]]
        assert [rank["store_blocks"] for rank in ranks] == [{CAPACITY}] * 2
        assert probe.state.store.capacity_blocks == CAPACITY
        assert sum(rank["store_bytes"] for rank in ranks) == GIB // 16

    def test_dense_and_sparse_with_drafts(self, probe, model):
        driver = Driver(probe)
        for index, length in enumerate((20, 300, 150, 90)):
            driver.add(str(length), prompt_of(length, seed=index), 25)
        driver.finish()
        sparse = {driver.requests[name].request_id for name in ("300", "150", "90")}
        assert probe.sparse == sparse
        assert all(probe.given_back[name] for name in sparse)
        assert len(driver.done) == 4
        assert all(rank["fetched_bytes"] for rank in probe.ranks())
        driver.assert_right_and_all_back(model)

    def test_aborts(self, probe, model):
        driver = Driver(probe)
        driver.add("stays", prompt_of(50), 20)
        for steps in (0, 1, 2, 4):  # Waiting, in its prefill, in its transition, sparse.
            driver.add(str(steps), prompt_of(200, seed=10 + steps), 100)
            driver.step(steps)
            known = driver.requests[str(steps)].request_id
            windows = [rank["requests"].get(known, "unknown") for rank in probe.ranks()]
            assert windows == {0: ["unknown"] * 2, 1: [None] * 2}.get(steps, [11, 11])
            assert bool(probe.given_back[known]) == (steps == 4)
            driver.abort(str(steps))
        driver.finish()
        assert set(driver.done) == {"stays"}
        driver.assert_right_and_all_back(model)

    def test_preempted_dense_and_sparse(self, probe, model):
        driver = Driver(probe)
        driver.add("dense", prompt_of(60, seed=20), 20)
        driver.add("sparse", prompt_of(200, seed=21), 20)
        known = driver.requests["sparse"].request_id
        driver.until(lambda: probe.given_back[known])
        driver.preempt("dense")
        driver.preempt("sparse")
        driver.step()
        assert all(rank["requests"][known] for rank in probe.ranks())
        driver.finish()
        assert driver.preemptions() == [1, 1]
        assert set(driver.done) == {"dense", "sparse"}
        driver.assert_right_and_all_back(model)

    def test_a_prefix_is_found_in_the_store_of_each_rank(self, probe, model):
        driver = Driver(probe)
        driver.add("first", prompt_of(300, seed=30), 3)
        driver.finish()
        assert probe.llm.reset_prefix_cache()
        driver.add("again", prompt_of(300, seed=30), 8)
        driver.finish()
        assert driver.found == {"first": 0, "again": 288}
        driver.assert_right_and_all_back(model)

    def test_what_one_rank_has_not_stored_is_nobodys_yet(self, probe, model):
        """Neither another's prefix, nor free when its request is gone."""
        driver = Driver(probe)
        prompt = prompt_of(90, seed=40)
        driver.add("late", prompt, 2)
        known = driver.requests["late"].request_id
        probe.set_faults(1, late=[(known, "write")])
        driver.finish()
        assert [rank["pending"] for rank in probe.ranks()] == [set(), {(known, "write")}]
        assert len(probe.state.held[known].store_blocks) == 5
        assert probe.llm.reset_prefix_cache()
        driver.add("other", prompt, 2)
        driver.finish()
        assert driver.found["other"] == 0
        assert known in probe.state.held
        probe.set_faults(1)
        driver.drain()
        driver.assert_right_and_all_back(model)

    def test_what_one_rank_lost_fails_its_request_and_no_other(self, probe, model):
        """The last one of this engine: what was lost is held for good."""
        driver = Driver(probe)
        driver.add("unlucky", prompt_of(150, seed=50), 60)
        unlucky = driver.requests["unlucky"].request_id
        probe.set_faults(1, lost=[(unlucky, "write")])
        driver.add("lucky", prompt_of(150, seed=51), 12)
        driver.finish()
        assert driver.failed == {"unlucky"}
        assert set(driver.done) == {"lucky"}
        assert is_greedy(model, driver.prompts["lucky"], driver.done["lucky"])
        greedy(probe.llm, [[1]], 1)
        assert set(probe.state.held) == {unlucky}
        held = probe.state.held[unlucky]
        assert probe.used == len(held.slots) == 448 // 16
        store = probe.state.store
        assert store.capacity_blocks - store.free_blocks == len(held.store_blocks)
        assert [rank["draining"] for rank in probe.ranks()] == [0, 1]
        assert [rank["requests"] for rank in probe.ranks()] == [{}, {}]


def test_one_kv_head_is_in_both_ranks(tmp_path_factory):
    """vLLM gives it to both, and the store of each holds it."""
    folder = save_tiny(tmp_path_factory.mktemp("one") / "m", head_dim=32, num_key_value_heads=1)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts = [prompt_of(length) for length in (40, 200)]
    sampling = SamplingParams(
        temperature=1, seed=7, max_tokens=15, ignore_eos=True, detokenize=False
    )

    def sampled(llm):
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    with probed(folder) as probe:
        expected = sampled(probe.llm)
    with ranked(folder) as probe:
        assert [rank["kv_heads"] for rank in probe.ranks()] == [[1], [1]]
        assert [rank["store_blocks"] for rank in probe.ranks()] == [{CAPACITY}] * 2
        for prompt, tokens in zip(prompts, greedy(probe.llm, prompts, 15), strict=True):
            assert is_greedy(model, prompt, tokens)
        assert sampled(probe.llm) == expected
        assert len(probe.sparse) == 4
        assert all(rank["fetched_bytes"] for rank in probe.ranks())
        greedy(probe.llm, [[1]], 1)
        probe.assert_all_back()


def test_when_one_rank_is_killed_the_engine_ends_and_leaves_nothing(tiny_folder):
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path]),
    }
    command = [sys.executable, str(TESTS / "plugin" / "endless.py"), str(tiny_folder), "2"]
    with generating(command, environment) as front_end:
        workers = [
            process for process, line in processes(front_end.pid).items() if "VLLM::Worker" in line
        ]
        assert len(workers) == 2, processes(front_end.pid)
        shared = set().union(*map(mapped, processes(front_end.pid)))
        assert shared
        os.kill(workers[1], signal.SIGKILL)
        assert front_end.wait(PATIENCE_S) != 0
    deadline = time.monotonic() + PATIENCE_S
    while left := processes(front_end.pid):
        assert time.monotonic() < deadline, left
    left = {path for path in map(Path, shared) if path.exists()}
    # vLLM's own ranks leave these on the CPU, killed or shut down, with or without us.
    vllms = {path for path in left if path.name.endswith(("-cpushm_0", "-cpushm_1"))}
    for path in vllms:
        path.unlink()
    assert left == vllms
