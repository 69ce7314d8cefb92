"""What users ask of vLLM beside plain sampling, on sparse requests: as stock vLLM answers."""

import math

import pytest
from vllm import SamplingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind, StructuredOutputsParams

from oasiskv.vllm import runtime
from plugin.engines import engine
from plugin.probe import NGRAM, probed
from tiny import prompt_of

NEW = 24
PROMPTS = [prompt_of(length) for length in (100, 116, 131)]
GREEDY = {"temperature": 0, "max_tokens": NEW, "ignore_eos": True}
RANDOM = GREEDY | {"temperature": 1, "seed": 5}
ARRAY = {"type": "array", "items": {"enum": [7]}}
FEATURES = {
    "several outputs": RANDOM | {"n": 3},
    "log-probabilities": GREEDY | {"logprobs": 5},
    "of the prompt": GREEDY | {"prompt_logprobs": 3},
    "penalties": GREEDY
    | {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    "top-k, top-p": RANDOM | {"top_k": 20, "top_p": 0.9},
    "stop string": GREEDY | {"stop": list("aeiou"), "include_stop_str_in_output": True},
    "stop token": GREEDY | {"stop_token_ids": list(range(20))},
    "bad words": GREEDY | {"bad_words": list("abcdefghij")},
    "allowed tokens": GREEDY | {"allowed_token_ids": list(range(10, 40))},
    "choice": GREEDY | {"structured_outputs": StructuredOutputsParams(choice=["yes", "no way"])},
    "regular expression": GREEDY
    | {"structured_outputs": StructuredOutputsParams(regex="[0-9]{3}-[a-c]{4}")},
    "JSON": GREEDY | {"structured_outputs": StructuredOutputsParams(json=ARRAY)},
    "grammar": GREEDY
    | {"structured_outputs": StructuredOutputsParams(grammar='root ::= ("ab" | "c") root | "."')},
}
NOT_WITH_DRAFTS = {"min-p": RANDOM | {"min_p": 0.1}, "bias": GREEDY | {"logit_bias": {7: 3.0}}}
"""vLLM itself refuses these with drafts, or warns that they do nothing."""
ARGS = {"num_gpu_blocks_override": 600, "max_model_len": 512, "max_num_seqs": 16}


def answers(llm, features):
    """By feature what each prompt gets: ``(tokens, finish reason, stop reason)`` of each output."""
    found = {}
    for name, settings in features.items():
        sampling = SamplingParams(**settings, output_kind=RequestOutputKind.FINAL_ONLY)
        requests = [{"prompt_token_ids": ids} for ids in PROMPTS]
        found[name] = llm.generate(requests, sampling, use_tqdm=False)
    return found


@pytest.fixture(scope="module")
def stock(tiny_folder):
    with engine(tiny_folder, **ARGS) as llm:
        found = answers(llm, FEATURES | NOT_WITH_DRAFTS)
        beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
        found["beams"] = llm.beam_search([{"prompt_token_ids": ids} for ids in PROMPTS], beams)
        return found


def streamed(llm, prompt):
    """Pieces of a greedy answer, as they come."""
    sampling = SamplingParams(**GREEDY, output_kind=RequestOutputKind.DELTA)
    llm.llm_engine.add_request("stream", {"prompt_token_ids": prompt}, sampling)
    pieces = []
    while llm.llm_engine.has_unfinished_requests():
        pieces += [output.outputs[0] for output in llm.llm_engine.step()]
    return pieces


def assert_same(ours, stock):
    for mine, theirs in zip(ours, stock, strict=True):
        assert [list(o.token_ids) for o in mine.outputs] == [
            list(o.token_ids) for o in theirs.outputs
        ]
        for one, other in zip(mine.outputs, theirs.outputs, strict=True):
            assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
            assert one.stop_reason == other.stop_reason
            assert_close(one.logprobs, other.logprobs)
        assert_close(mine.prompt_logprobs, theirs.prompt_logprobs)


def assert_close(ours, stock):
    assert (ours is None) == (stock is None)
    for mine, theirs in zip(ours or [], stock or [], strict=True):
        for token, entry in (theirs or {}).items():
            assert math.isclose(mine[token].logprob, entry.logprob, abs_tol=1e-3)


@pytest.mark.parametrize(
    ("tiered", "drafts", "lookahead"),
    [
        pytest.param("one by one", None, "last_accepted", marks=pytest.mark.smoke),
        ("at once", None, "last_accepted"),
        ("one by one", NGRAM, "last_accepted"),
        ("at once", NGRAM, "held_back"),
    ],
    ids=["one by one", "at once", "one by one, drafts", "at once, drafts held back"],
)
def test_each_feature_as_in_stock_vllm(tiny_folder, stock, monkeypatch, tiered, drafts, lookahead):
    monkeypatch.setattr(runtime, "BATCHED_ON", {"cpu"} if tiered == "at once" else set())
    features = FEATURES if drafts else FEATURES | NOT_WITH_DRAFTS
    if drafts:
        # vLLM's own CPU build samples drafts from unwritten memory; docs/vllm.md says more.
        features = {name: f for name, f in features.items() if not f["temperature"]}
    args = ARGS | {"speculative_config": drafts, "settings": {"lookahead": lookahead}}
    with probed(tiny_folder, **args) as probe:
        for name, outputs in answers(probe.llm, features).items():
            assert_same(outputs, stock[name])
        assert len(probe.sparse) >= len(features) * len(PROMPTS) - 6
        assert probe.refetch.fetched_bytes > 0
        for prompt, expected in zip(PROMPTS, stock["log-probabilities"], strict=True):
            pieces = streamed(probe.llm, prompt)
            assert len(pieces) > NEW / 4
            assert [token for piece in pieces for token in piece.token_ids] == list(
                expected.outputs[0].token_ids
            )
            assert "".join(piece.text for piece in pieces) == expected.outputs[0].text
        if not drafts:
            beams = BeamSearchParams(beam_width=3, max_tokens=8, ignore_eos=True)
            prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
            found = probe.llm.beam_search(prompts, beams)
            for mine, theirs in zip(found, stock["beams"], strict=True):
                assert [s.tokens for s in mine.sequences] == [s.tokens for s in theirs.sequences]


def test_priorities(tiny_folder):
    """The important one is served first, and the others come to their end."""
    args = ARGS | {"scheduling_policy": "priority", "max_num_seqs": 1}
    with probed(tiny_folder, **args) as probe:
        order = []
        for index, priority in enumerate((5, 5, 0)):
            sampling = SamplingParams(**GREEDY)
            request = {"prompt_token_ids": PROMPTS[index]}
            probe.llm.llm_engine.add_request(str(index), request, sampling, priority=priority)
        while probe.llm.llm_engine.has_unfinished_requests():
            order += [o.request_id for o in probe.llm.llm_engine.step() if o.finished]
        assert order == ["2", "0", "1"]


def test_best_of_is_not_in_vllm():
    """It was taken out of vLLM; several outputs ranked by log-probability are what is left."""
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(**GREEDY, best_of=2)
