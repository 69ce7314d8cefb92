"""With a hot set smaller than the context the plugin chooses what the reference engine chooses."""

import pytest

import oasiskv.vllm
from oasiskv.config import OasisConfig
from oasiskv.hf import Engine, load_model
from oasiskv.stores.host import HostStore
from oasiskv.vllm.runtime import current_runtime
from plugin.engines import engine, greedy
from tiny import prompt_of

NEW = 48
LENGTHS = (400, 413, 600)
NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
SIZES = {"budget_tokens": 64, "hot_tokens": 96, "sink_tokens": 16, "window_tokens": 32}


class Replay:
    """Proposes the drafts that vLLM proposed after the same tokens."""

    def __init__(self, drafts):
        self._drafts = drafts

    def propose(self, request_id, tokens, max_drafts):
        return self._drafts[request_id].get(len(tokens), [])[:max_drafts]

    def finish(self, request_id):
        pass


def in_vllm(folder, prompts, lookahead, speculative):
    """Tokens, and per request each step's drafts, accepted tokens and wanted blocks."""
    settings = oasiskv.vllm.engine_args(host_gib=0.05, lookahead=lookahead, **SIZES)
    steps = {}

    def observe(record):
        wanted = None if record.selection is None else record.selection.wanted
        # vLLM's ids are the prompt's number and a suffix.
        number = record.request.request_id.split("-")[0]
        steps.setdefault(number, []).append((record.drafts, record.accepted, wanted))

    extra = {"speculative_config": speculative} if speculative else {}
    with engine(folder, **(settings | extra), max_model_len=1024) as llm:
        current_runtime().observer = observe
        return greedy(llm, prompts, NEW), steps


def in_reference(folder, prompts, lookahead, steps):
    """The same from the reference engine, which is fed vLLM's drafts."""
    drafts = {}
    for number, prompt in enumerate(prompts):
        known, at = {}, len(prompt)
        for proposed, accepted, _ in steps[str(number)]:
            known[at] = proposed
            at += len(accepted)
        drafts[str(number)] = known
    loaded = load_model(folder)
    config = OasisConfig(lookahead=lookahead, **SIZES)
    reference = Engine(loaded, config, HostStore(loaded.geometry, 150), Replay(drafts))
    seen = {}
    reference.observer = lambda record: seen.setdefault(record.request.request_id, []).append(
        (record.accepted, None if record.selection is None else record.selection.wanted)
    )
    requests = [reference.submit(str(i), prompt, NEW) for i, prompt in enumerate(prompts)]
    for output in reference.stream():
        assert output.error is None
    return [request.output for request in requests], seen


@pytest.mark.parametrize(
    ("lookahead", "speculative"),
    [("last_accepted", None), ("held_back", NGRAM), ("paper", NGRAM)],
)
def test_tokens_and_wanted_blocks_are_the_reference_engines(tiny_folder, lookahead, speculative):
    prompts = [prompt_of(length) for length in LENGTHS]
    tokens, steps = in_vllm(tiny_folder, prompts, lookahead, speculative)
    expected, seen = in_reference(tiny_folder, prompts, lookahead, steps)
    assert tokens == expected
    compared = same = 0
    for number in seen:
        for (_, ours, wanted), (theirs, reference) in zip(steps[number], seen[number], strict=True):
            assert ours == theirs
            assert (wanted is None) == (reference is None)
            if wanted is not None:
                equal = wanted.sort(-1).values == reference.sort(-1).values
                compared, same = compared + equal.numel(), same + int(equal.sum())
    assert compared > 1000
    # The two forwards round differently, so that blocks of nearly equal score may change places.
    assert same / compared > 0.999
