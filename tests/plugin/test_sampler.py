"""Drafts held back from the sampler: metadata as if they had never been proposed."""

from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.vllm.sampler import HeldBackSampler, hold_back
from plugin.engines import engine

CPU = torch.device("cpu")
BATCHES = {
    "one request, no draft": [[]],
    "one request, one draft": [[5]],
    "one request, three drafts": [[5, 6, 7]],
    "no request has drafts": [[], [], []],
    "one draft each": [[5], [6], [7]],
    "mixed": [[], [5], [6, 7, 8], [], [9, 10], [11]],
    "ends without": [[1, 2, 3], []],
}
"""Draft tokens of each request."""


@pytest.fixture(scope="module", autouse=True)
def cpu_kernels(tiny_folder):
    """An engine that starts has vLLM put its CPU kernels in the place of Triton's, for good."""
    with engine(tiny_folder):
        pass


def metadata_of(drafts):
    """vLLM's metadata with the indices that its runner would compute."""
    metadata = SpecDecodeMetadata.make_dummy(drafts, CPU)
    target, bonus, start = [], [], 0
    for ids in drafts:
        target.extend(range(start, start + len(ids)))
        bonus.append(start + len(ids))
        start += len(ids) + 1
    return replace(
        metadata,
        target_logits_indices=torch.tensor(target, dtype=torch.int32),
        bonus_logits_indices=torch.tensor(bonus, dtype=torch.int32),
        logits_indices=torch.arange(start, dtype=torch.int32),
    )


def counts_to_keep(drafts):
    """None, half, all but one, all."""
    lengths = [len(ids) for ids in drafts]
    return [
        [0] * len(lengths),
        [n // 2 for n in lengths],
        [max(0, n - 1) for n in lengths],
        lengths,
    ]


@pytest.mark.smoke
@pytest.mark.parametrize("drafts", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("which", range(4))
def test_metadata_is_that_of_the_shorter_drafts(drafts, which):
    """But for what says where in the logits a request is: the next test."""
    kept = counts_to_keep(drafts)[which]
    seen, keep = hold_back(metadata_of(drafts), kept)
    few = [ids[:n] for ids, n in zip(drafts, kept, strict=True)]
    expected = SpecDecodeMetadata.make_dummy(few, CPU)
    for name in ("draft_token_ids", "cu_num_draft_tokens"):
        assert getattr(seen, name).dtype == getattr(expected, name).dtype
        assert getattr(seen, name).tolist() == getattr(expected, name).tolist()
    assert seen.num_draft_tokens == expected.num_draft_tokens == kept
    assert seen.max_spec_len == max(kept)
    assert keep.tolist() == [
        i < n for ids, n in zip(drafts, kept, strict=True) for i in range(len(ids))
    ]


@pytest.mark.parametrize("drafts", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("which", range(4))
def test_every_request_reads_its_own_rows_of_the_logits(drafts, which):
    """The logits stay as they are: those of request r begin at row starts[r]."""
    kept = counts_to_keep(drafts)[which]
    seen, _ = hold_back(metadata_of(drafts), kept)
    starts = [sum(len(ids) + 1 for ids in drafts[:r]) for r in range(len(drafts))]
    target = [start + i for start, n in zip(starts, kept, strict=True) for i in range(n)]
    assert seen.target_logits_indices.tolist() == target
    assert seen.bonus_logits_indices.tolist() == [s + n for s, n in zip(starts, kept, strict=True)]
    ends = seen.cu_num_sampled_tokens.tolist()
    # vLLM finds the log-probabilities of a request from where the one before it ends.
    assert [0, *ends[:-1]] == starts


def test_the_original_is_not_modified():
    drafts = BATCHES["mixed"]
    metadata, untouched = metadata_of(drafts), metadata_of(drafts)
    hold_back(metadata, [0] * len(drafts))
    for field in fields(metadata):
        before, after = getattr(untouched, field.name), getattr(metadata, field.name)
        assert before.tolist() == after.tolist() if torch.is_tensor(before) else before == after


def sampling(rows, greedy=True, **settings):
    """What vLLM's sampler reads of its own metadata when nothing is asked for."""
    defaults = {
        "temperature": None if greedy else torch.ones(rows),
        "all_greedy": greedy,
        "all_random": not greedy,
        "top_p": None,
        "top_k": None,
        "generators": {},
        "max_num_logprobs": None,
        "no_penalties": True,
        "prompt_token_ids": None,
        "frequency_penalties": torch.zeros(rows),
        "presence_penalties": torch.zeros(rows),
        "repetition_penalties": torch.ones(rows),
        "output_token_ids": [[] for _ in range(rows)],
        "allowed_token_ids_mask": None,
        "bad_words_token_ids": {},
        "logitsprocs": LogitsProcessors(),
    }
    return SamplingMetadata(**(defaults | settings))


def run(mode, drafts, logits, **settings):
    """Tokens of each request, without vLLM's placeholders; and the whole output."""
    sampler = HeldBackSampler(RejectionSampler(Sampler()), mode)
    output = sampler(metadata_of(drafts), None, logits, sampling(len(drafts), **settings))
    return [[t for t in row if t >= 0] for row in output.sampled_token_ids.tolist()], output


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("mode", "most"), [(LookaheadMode.HELD_BACK, -1), (LookaheadMode.PAPER, 0)]
)
@pytest.mark.parametrize("right", [True, False])
def test_greedy_tokens_are_the_targets_and_end_where_drafts_are_held_back(mode, most, right):
    drafts = BATCHES["mixed"]
    rows = sum(len(ids) + 1 for ids in drafts)
    logits = torch.rand((rows, 40), generator=torch.Generator().manual_seed(0))
    wanted, start = [], 0
    for ids in drafts:
        if right:
            logits[range(start, start + len(ids)), ids] = 2.0
        best = logits[start : start + len(ids) + 1].argmax(-1).tolist()
        held_back_from = max(0, len(ids) - 1) if most else 0
        accepted = 0
        while accepted < held_back_from and best[accepted] == ids[accepted]:
            accepted += 1
        wanted.append(best[: accepted + 1])
        start += len(ids) + 1
    assert run(mode, drafts, logits)[0] == wanted
    assert (max(map(len, wanted)) > 1) == (right and mode is LookaheadMode.HELD_BACK)


@pytest.mark.parametrize("mode", [LookaheadMode.HELD_BACK, LookaheadMode.PAPER])
def test_log_probabilities_are_those_of_the_tokens(mode):
    drafts = BATCHES["mixed"]
    rows = sum(len(ids) + 1 for ids in drafts)
    logits = torch.randn((rows, 40), generator=torch.Generator().manual_seed(0))
    starts = [sum(len(ids) + 1 for ids in drafts[:r]) for r in range(len(drafts))]
    for start, ids in zip(starts, drafts, strict=True):
        logits[range(start, start + len(ids)), ids] = 6.0
    tokens, output = run(mode, drafts, logits.clone(), max_num_logprobs=1)
    width = output.sampled_token_ids.shape[1]
    values = output.logprobs_tensors.logprobs.view(len(drafts), width, -1)
    for row, (start, chosen) in enumerate(zip(starts, tokens, strict=True)):
        expected = logits[start : start + len(chosen)].log_softmax(-1)
        torch.testing.assert_close(
            values[row, : len(chosen), 0], expected[range(len(chosen)), chosen]
        )


def test_trims_the_drafts_that_penalties_read():
    read = []

    class Recorder:
        def __call__(self, metadata, probs, logits, sampling_metadata):
            read.append((metadata.num_draft_tokens, probs, sampling_metadata.spec_token_ids))

    drafts = [[], [5], [6, 7, 8]]
    probs = torch.arange(4.0)[:, None].expand(4, 9)
    own = sampling(3, spec_token_ids=[*drafts, [1, 2]])
    HeldBackSampler(Recorder(), LookaheadMode.HELD_BACK)(
        metadata_of(drafts), probs, torch.zeros(7, 9), own
    )
    [(counts, kept, spec)] = read
    assert counts == [0, 0, 2]
    assert kept[:, 0].tolist() == [1.0, 2.0]
    assert spec[:3] == [[], [], [6, 7]]
    assert own.spec_token_ids == [*drafts, [1, 2]]


def test_the_runner_finds_everything_else_of_the_sampler():
    inner = SimpleNamespace(parse_output="vLLM's")
    assert HeldBackSampler(inner, LookaheadMode.PAPER).parse_output == "vLLM's"
