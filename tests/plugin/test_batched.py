"""Requests tiered at once, as on CUDA, with the references in place of the kernels."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from oasiskv.vllm import runtime
from oasiskv.vllm.batch_layers import BatchLayers
from plugin.driver import Driver
from plugin.engines import greedy
from plugin.noise import measure_noise
from plugin.probe import NGRAM, is_greedy, probed
from plugin.truth import SMALL, assert_truth
from tiny import prompt_of


@pytest.fixture(autouse=True, scope="module")
def batched():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "BATCHED_ON", {"cpu"})
        yield


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.mark.parametrize(
    ("lookahead", "speculative", "digest"),
    [
        ("last_accepted", None, "keys4"),
        ("held_back", NGRAM, "keys4"),
        ("held_back", NGRAM, "minmax"),
        ("paper", NGRAM, "keys4"),
    ],
)
def test_tokens_and_wanted_blocks_are_the_reference_engines(
    tiny_folder, lookahead, speculative, digest
):
    settings = SMALL | {"lookahead": lookahead, "digest": digest}
    args = {"speculative_config": speculative, "max_model_len": 1024}
    prompts = [prompt_of(length) for length in (400, 413, 600)]
    _, compared, _ = assert_truth(tiny_folder, prompts, 48, settings, **args)
    assert compared > 1000


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_in_16_bits_the_reference_engine_is_no_more_than_noise_apart(tiny_folder, dtype):
    settings = SMALL | {"lookahead": "held_back"}
    args = {"speculative_config": NGRAM, "max_model_len": 1024}
    prompts = [prompt_of(length) for length in (400, 413, 600)]
    found = measure_noise(tiny_folder, prompts, 32, settings, dtype, "cpu", 90, **args)
    found.check()
    assert found.compared > 1000


@pytest.mark.smoke
@pytest.mark.parametrize(
    "args",
    [
        {},
        {"speculative_config": NGRAM, "settings": {"lookahead": "held_back"}},
        {"settings": {"threshold_tokens": 108}, "max_num_batched_tokens": 72},
    ],
    ids=["no drafts", "held_back", "in mid-decode, small steps"],
)
def test_forced_refetch_gives_the_targets_greedy_tokens(tiny_folder, model, args):
    pool = {"num_gpu_blocks_override": 1000, "enable_prefix_caching": False, "max_num_seqs": 8}
    prompts = [prompt_of(length) for length in [*range(96, 112), 7, 16, 250]]
    with probed(tiny_folder, **(pool | args)) as probe:
        assert isinstance(probe.runtime.target, BatchLayers)
        outputs = greedy(probe.llm, prompts, 24)
        for prompt, tokens in zip(prompts, outputs, strict=True):
            assert is_greedy(model, prompt, tokens), len(prompt)
        assert len(probe.sparse) >= 17
        assert probe.refetch.fetched_bytes > 0
        probe.assert_all_back()


@pytest.fixture(scope="module")
def probe(tiny_folder):
    with probed(tiny_folder, settings={"threshold_tokens": 100}) as probe:
        yield probe


@pytest.mark.parametrize("steps", [0, 2, 4, 9])
def test_abort(probe, model, steps):
    driver = Driver(probe)
    driver.add("aborted", prompt_of(200, seed=steps), 100)
    driver.step(steps)
    driver.add("other", prompt_of(150), 12)
    driver.abort("aborted")
    driver.finish()
    assert set(driver.done) == {"other"}
    driver.assert_right_and_all_back(model)
    target = probe.runtime.target
    assert len(set(target.tiering.free_rows)) == 8 - len(target.requests)
