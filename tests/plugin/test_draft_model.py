"""Drafts of a draft model, whose own layers go sparse beside the target's.

The draft computes the target's function with twice the KV heads, so that in exact settings all of
its drafts are right: one that is not accepted has read a wrong tile.
"""

import pytest
import torch
from transformers import AutoModelForCausalLM

from plugin.driver import Driver
from plugin.engines import greedy
from plugin.probe import is_greedy, probed
from tiny import prompt_of
from tiny_folder import save_tiny

RESIDUES = [prompt_of(length) for length in range(96, 112)]
"""Every number of tokens in the open block."""
SHORT = [prompt_of(length) for length in (7, 16)]
NEW = 20
ARGS = {"num_gpu_blocks_override": 1000, "max_num_batched_tokens": 72}
"""Prompts take several steps, which do not end with a block."""


@pytest.fixture(scope="module")
def model(tiny_folder):
    return AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def draft_folder(tiny_folder, model, tmp_path_factory):
    folder = save_tiny(
        tmp_path_factory.mktemp("model") / "draft", head_dim=32, num_key_value_heads=4
    )
    draft = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = model.state_dict()
    for name, weight in weights.items():
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            heads = weight.unflatten(0, (2, 32)).repeat_interleave(2, dim=0)
            weights[name] = heads.flatten(0, 1)
    draft.load_state_dict(weights)
    draft.save_pretrained(folder)
    return folder


def draft_probed(tiny_folder, draft_folder, drafts, lookahead, **args):
    speculative = {
        "method": "draft_model",
        "model": str(draft_folder),
        "num_speculative_tokens": drafts,
    }
    settings = {"lookahead": lookahead, **args.pop("settings", {})}
    args = ARGS | args
    return probed(tiny_folder, settings=settings, speculative_config=speculative, **args)


@pytest.mark.parametrize(
    ("lookahead", "drafts"),
    [("last_accepted", 3), ("held_back", 3), ("paper", 3), ("held_back", 1)],
)
def test_every_draft_is_right_and_accepted_as_the_mode_says(
    tiny_folder, draft_folder, model, lookahead, drafts
):
    args = {"enable_prefix_caching": drafts == 3}
    with draft_probed(tiny_folder, draft_folder, drafts, lookahead, **args) as probe:
        target, draft = probe.runtime.models
        assert draft.geometry.block_bytes == 2 * target.geometry.block_bytes
        assert draft.store.nbytes == 2 * target.store.nbytes
        seen = []
        probe.runtime.observer = seen.append
        outputs = greedy(probe.llm, RESIDUES + SHORT, NEW)
        for prompt, tokens in zip(RESIDUES + SHORT, outputs, strict=True):
            assert is_greedy(model, prompt, tokens)
        held = {"last_accepted": 0, "held_back": 1, "paper": drafts}[lookahead]
        after_prompt = [record for record in seen if record.drafts]
        assert len(after_prompt) >= 5 * len(outputs)
        for record in after_prompt:
            assert len(record.accepted) == 1 + max(0, len(record.drafts) - held)
        assert len(probe.sparse) == len(outputs)
        # One share of the bytes is the target's, two are the draft's.
        assert probe.refetch.fetched_bytes > 0
        assert probe.refetch.fetched_bytes % (3 * target.geometry.tile_bytes) == 0
        probe.assert_all_back()


@pytest.mark.smoke
def test_a_step_in_which_vllm_does_not_draft_leaves_no_hole(tiny_folder, draft_folder, model):
    """Near max_model_len vLLM drafts for no request of the batch: their draft KV is not written."""
    args = {"max_model_len": 160, "settings": {"threshold_tokens": 80}}
    with draft_probed(tiny_folder, draft_folder, 3, "last_accepted", **args) as probe:
        driver, skipped = Driver(probe), []

        def watch(record):
            draft = probe.runtime.models[1].requests[record.request_id]
            skipped.append(not draft.queries[0])

        probe.runtime.observer = watch
        driver.add("longest", prompt_of(120), 40)
        driver.add("beside it", prompt_of(70), 60)
        driver.finish()
        assert any(skipped)
        assert not all(skipped)
        assert len(probe.sparse) == 2
        driver.assert_right_and_all_back(model)


@pytest.mark.parametrize("caching", [True, False])
def test_preempted_sparse(tiny_folder, draft_folder, model, caching):
    """The draft's slots come back as the target's do."""
    args = {"enable_prefix_caching": caching, "settings": {"threshold_tokens": 100}}
    with draft_probed(tiny_folder, draft_folder, 3, "last_accepted", **args) as probe:
        seen = []
        probe.runtime.observer = seen.append
        driver = Driver(probe)
        driver.add("one", prompt_of(120), 80)
        driver.step(5)
        for steps in (1, 2, 3, 1, 2):
            driver.preempt("one")
            driver.step(steps)
        driver.finish()
        assert not probe.restarted
        drafted = [record for record in seen if record.drafts]
        assert len(drafted) >= 10
        assert all(len(r.accepted) == 1 + len(r.drafts) for r in drafted[:-1])
        assert not any(part.kept for part in probe.runtime.models)
        driver.assert_right_and_all_back(model)


@pytest.fixture(scope="module")
def probe(tiny_folder, draft_folder):
    with draft_probed(tiny_folder, draft_folder, 3, "held_back") as probe:
        yield probe


@pytest.mark.parametrize("steps", [2, 4, 9])
def test_abort(probe, model, steps):
    driver = Driver(probe)
    driver.add("aborted", prompt_of(200, seed=steps), 100)
    driver.step(steps)
    driver.add("other", prompt_of(50), 12)
    driver.abort("aborted")
    driver.finish()
    assert set(driver.done) == {"other"}
    driver.assert_right_and_all_back(model)
