"""The same prompts in vLLM and in the reference engine: tokens and wanted blocks, step by step."""

from dataclasses import replace

import oasiskv.vllm
from oasiskv.config import OasisConfig
from oasiskv.hf import Engine, load_model
from oasiskv.stores.host import HostStore
from oasiskv.vllm.runtime import current_runtime
from plugin.engines import engine, greedy


def assert_truth(folder, prompts, new, settings, **engine_args):
    """The plugin chooses what the reference engine chooses, which is fed vLLM's drafts.

    Returns:
        ``(tokens, wanted blocks compared, drafts accepted)``.
    """
    tokens, steps = in_vllm(folder, prompts, new, settings, **engine_args)
    expected, seen = in_reference(folder, prompts, new, settings, steps)
    assert tokens == expected
    compared = same = accepted = 0
    for number in seen:
        for (_, ours, wanted), (theirs, reference) in zip(steps[number], seen[number], strict=True):
            assert ours == theirs
            accepted += len(ours) - 1
            assert (wanted is None) == (reference is None)
            if wanted is not None:
                both = (wanted[..., None] == reference[..., None, :]) & (wanted >= 0)[..., None]
                compared, same = compared + int((wanted >= 0).sum()), same + int(both.sum())
    # The two forwards round differently, so that blocks of nearly equal score may change places.
    assert same / compared > 0.999
    return tokens, compared, accepted


SMALL = {
    "budget_tokens": 64,
    "hot_tokens": 96,
    "sink_tokens": 16,
    "window_tokens": 32,
    "host_gib": 0.05,
}
"""Settings under which a few hundred tokens are far more than the hot set holds."""


class Replay:
    """Proposes the drafts that vLLM proposed after the same tokens."""

    def __init__(self, drafts):
        self._drafts = drafts

    def propose(self, request_id, tokens, max_drafts):
        return self._drafts[request_id].get(len(tokens), [])[:max_drafts]

    def finish(self, request_id):
        pass


def in_vllm(folder, prompts, new, settings, **engine_args):
    """Tokens, and per request each step's drafts, accepted tokens and wanted blocks."""
    plugin = oasiskv.vllm.engine_args(**settings)
    steps = {}

    def observe(record):
        # vLLM's ids are the prompt's number and a suffix.
        number = record.request_id.split("-")[0]
        steps.setdefault(number, []).append((record.drafts, record.accepted, record.wanted))

    with engine(folder, **(plugin | engine_args)) as llm:
        current_runtime().observer = observe
        return greedy(llm, prompts, new), steps


def in_reference(folder, prompts, new, settings, steps):
    """The same from the reference engine, which is fed vLLM's drafts."""
    drafts = {}
    for number, prompt in enumerate(prompts):
        known, at = {}, len(prompt)
        for proposed, accepted, _ in steps[str(number)]:
            known[at] = proposed
            at += len(accepted)
        drafts[str(number)] = known
    loaded = replace(load_model(folder), eos_tokens=frozenset())
    blocks = sum(1 + (len(prompt) + new) // 16 for prompt in prompts)
    store = HostStore(loaded.geometry, blocks)
    reference = Engine(loaded, OasisConfig(**settings), store, Replay(drafts))
    seen = {}
    reference.observer = lambda record: seen.setdefault(record.request.request_id, []).append(
        (record.accepted, None if record.selection is None else record.selection.wanted)
    )
    requests = [reference.submit(str(i), prompt, new) for i, prompt in enumerate(prompts)]
    for output in reference.stream():
        assert output.error is None
    return [request.output for request in requests], seen
