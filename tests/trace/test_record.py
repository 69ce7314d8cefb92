"""What is recorded is what the reference engine's selection said, step by step."""

import pytest
import torch

from oasiskv.core.selection import top_blocks
from oasiskv.drafts.base import NoDrafts
from oasiskv.errors import ConfigError, TraceError
from oasiskv.evals.tasks.base import Question
from oasiskv.hf import Engine
from oasiskv.stores.host import HostStore
from oasiskv.trace.record import record, recording_config
from tiny import prompt_of, tiny_llama

CONFIG = recording_config(64, 96, "keys4")


def question_of(prompt, asked, answer):
    return Question("made", "made-0", "made-0", prompt, asked, answer, "forced", len(answer))


def engine_run(question):
    """Per step position, end of the candidates, wanted sets, and the scores' own top K."""
    loaded = tiny_llama()
    forced = [*question.question, *question.answer]
    store = HostStore(loaded.geometry, 100)
    engine = Engine(loaded, CONFIG, store=store, drafts=NoDrafts())
    steps = []

    def keep(step):
        if step.selection is not None:
            request = step.request
            chosen = request.predicted.clone()
            steps.append(
                (request.computed, request.kv.window_start, step.selection.wanted.clone(), chosen)
            )

    engine.observer = keep
    engine.submit("again", question.prompt, len(forced), forced=forced)
    engine.run()
    return steps


@pytest.mark.parametrize("prompt_tokens", [400, 150, 60])
def test_a_trace_holds_what_the_engine_wanted(prompt_tokens):
    text = prompt_of(prompt_tokens + 170)
    question = question_of(
        text[:prompt_tokens], text[prompt_tokens : prompt_tokens + 20], text[prompt_tokens + 20 :]
    )
    seen = []
    trace = record(tiny_llama(), question, CONFIG, "tiny", seen.append)
    expected = engine_run(question)
    assert trace.header.steps == len(expected) > 10
    for step, (position, end, wanted, chosen) in zip(trace.steps(), expected, strict=True):
        assert (step.position, step.end) == (position, end)
        ordered = torch.where(wanted < 0, 2**30, wanted).sort(dim=-1).values
        found = torch.from_numpy(step.wanted)
        assert torch.equal(torch.where(found < 0, 2**30, found), ordered)
        # Without hysteresis that is the plain top K of the scores, whatever is resident.
        mask = torch.zeros(*found.shape[:2], end + 1, dtype=torch.bool)
        mask.scatter_(-1, torch.where(found < 0, end, found), True)
        assert torch.equal(mask[..., CONFIG.sink_blocks : end], chosen)
        assert torch.equal(chosen, top_blocks(chosen.float(), CONFIG.budget_blocks))
    # Tokens of prefill and of every step are reported, up to the last one, which is not computed.
    assert seen == sorted(seen)
    assert seen[-1] == prompt_tokens + 169


def test_the_header_says_how_it_was_recorded():
    text = prompt_of(300)
    trace = record(tiny_llama(), question_of(text[:280], [], text[280:]), CONFIG, "tiny", print)
    head, run = trace.header, trace.header.recording
    assert (head.layers, head.kv_heads, head.block_tokens) == (2, 2, 16)
    assert (head.budget_blocks, head.sink_blocks, head.window_blocks) == (4, 1, 4)
    assert (run.model, run.text, run.context_tokens) == ("tiny", "made-0", 300)
    assert (run.lookahead, run.drafts, run.hysteresis) == ("last_accepted", "none", 1.0)
    assert (run.digest, run.hot_blocks, run.cap_blocks) == ("keys4", 6, 1)
    # The prompt's last step goes sparse, the token after it is the first that wants blocks.
    assert (head.steps, trace.positions[0]) == (19, 281)


def test_a_context_that_stays_dense_has_nothing_to_record():
    text = prompt_of(150)
    with pytest.raises(TraceError, match="too short to go sparse"):
        record(tiny_llama(), question_of(text[:140], [], text[140:]), CONFIG, "tiny", print)


def test_a_task_without_a_known_answer():
    with pytest.raises(ConfigError, match="no known answer"):
        record(tiny_llama(), question_of(prompt_of(300), [], []), CONFIG, "tiny", print)
