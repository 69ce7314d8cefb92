"""The host store as a prefix cache: blocks found by content, and a preempted request's own."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams

from oasiskv.vllm import runtime
from plugin.driver import Driver
from plugin.engines import greedy
from plugin.probe import NGRAM, is_greedy, probed
from tiny import prompt_of


@pytest.fixture(scope="module", params=["one by one", "at once"], autouse=True)
def tiered(request):
    """On the CPU in both ways."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runtime, "BATCHED_ON", {"cpu"} if request.param == "at once" else set())
        yield


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


def cached_tokens(probe, prompts, new):
    """``(tokens, prompt tokens found)`` of each."""
    sampling = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = probe.llm.generate(inputs, sampling, use_tqdm=False)
    return [(list(o.outputs[0].token_ids), o.num_cached_tokens) for o in outputs]


def forget_hbm(probe):
    """vLLM's own prefix cache, in HBM, is empty from here on."""
    assert probe.llm.reset_prefix_cache()


@pytest.mark.smoke
@pytest.mark.parametrize("drafts", [None, NGRAM], ids=["no drafts", "drafts"])
def test_a_prompt_that_was_evicted_from_hbm_is_found_in_the_store(tiny_folder, model, drafts):
    prompt = prompt_of(1500)
    settings = {"hot_tokens": 1600, "lookahead": "held_back"}
    args = {"num_gpu_blocks_override": 400, "max_model_len": 1600, "speculative_config": drafts}
    with probed(tiny_folder, settings=settings, **args) as probe:
        [(first, found)] = cached_tokens(probe, [prompt], 20)
        assert found == 0
        forget_hbm(probe)
        [(second, found)] = cached_tokens(probe, [prompt], 20)
        assert len(prompt) - 32 < found < len(prompt)
        assert second == first
        assert is_greedy(model, prompt, second)
        # HBM holds the first half; the store has the rest.
        forget_hbm(probe)
        greedy(probe.llm, [prompt[:750]], 1)
        [(third, found)] = cached_tokens(probe, [prompt], 20)
        assert len(prompt) - 32 < found < len(prompt)
        assert third == first
        probe.assert_all_back()


def test_a_shared_prefix_is_stored_once(tiny_folder, model):
    prefix = prompt_of(160)
    prompts = [prefix + prompt_of(20, seed=index) for index in range(50)]
    with probed(tiny_folder, num_gpu_blocks_override=3000, max_num_seqs=50) as probe:
        greedy(probe.llm, [prefix], 1)
        forget_hbm(probe)
        driver = Driver(probe)
        for index, prompt in enumerate(prompts):
            driver.add(str(index), prompt, 8)
        driver.step(2)
        assert len(probe.state.admitted) == 50
        store = probe.state.store
        used = store.capacity_blocks - store.free_blocks
        # 10 blocks are the prefix's, each prompt adds one; and one may close while it decodes.
        assert 10 + 50 <= used <= 10 + 50 * 2
        shared = {tuple(r.store_blocks[:10]) for r in probe.state.requests.values()}
        assert len(shared) == 1
        assert {r.known for r in probe.state.requests.values()} == {10}
        driver.finish()
        driver.assert_right_and_all_back(model)


def test_what_a_sparse_request_decodes_is_nobody_elses_prefix(tiny_folder, model):
    prompt = prompt_of(200)
    with probed(tiny_folder, num_gpu_blocks_override=300) as probe:
        [tokens] = greedy(probe.llm, [prompt], 100)
        forget_hbm(probe)
        [(more, found)] = cached_tokens(probe, [prompt + tokens], 8)
        assert found == len(prompt) // 16 * 16
        assert probe.state.store.kept_blocks
        assert is_greedy(model, prompt + tokens, more)
        probe.assert_all_back()


def test_without_vllms_prefix_caching_nothing_is_shared(tiny_folder):
    with probed(tiny_folder, num_gpu_blocks_override=300, enable_prefix_caching=False) as probe:
        prompt = prompt_of(200)
        greedy(probe.llm, [prompt], 4)
        [(_, found)] = cached_tokens(probe, [prompt], 4)
        assert not found
        assert not probe.state.store.kept_blocks


@pytest.mark.smoke
@pytest.mark.parametrize("caching", [True, False])
def test_a_preempted_request_computes_one_block_again(tiny_folder, model, caching):
    """Sparse ones fill the pool; dense ones before them, which stay dense, grow."""
    with probed(
        tiny_folder,
        num_gpu_blocks_override=8 * 7 + 12 + 1,
        max_model_len=256,
        enable_prefix_caching=caching,
        settings={"threshold_tokens": 116, "hot_tokens": 160},
    ) as probe:
        driver = Driver(probe)
        steps, computed = {}, {}

        def watch(record):
            steps.setdefault(record.request_id, []).append(record.tokens)

        def note(scheduled):
            for name, count in scheduled.num_scheduled_tokens.items():
                computed[name] = computed.get(name, 0) + count

        probe.runtime.observer = watch
        begin = probe.runtime.begin_step

        def begin_step(scheduled):
            note(scheduled)
            begin(scheduled)

        probe.runtime.begin_step = begin_step
        for index in range(3):
            driver.add(f"dense {index}", prompt_of(40, seed=index), 76)
        for index in range(4):
            driver.add(str(index), prompt_of(117, seed=index), 60)
            driver.step(2)
        driver.finish(most=800)
        preempted = [r for r in driver.requests.values() if r.num_preemptions]
        assert preempted
        for request in preempted:
            # All but the last token, which is not computed; and up to a block and a token again.
            once = request.num_tokens - 1
            again = computed[request.request_id] - once
            assert 0 < again <= 17 * request.num_preemptions
        assert len(driver.done) == 7
        driver.assert_right_and_all_back(model)
