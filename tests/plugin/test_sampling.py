"""Sampled output keeps the target's distribution while the last draft is held back."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm import SamplingParams
from vllm.v1.sample import rejection_sampler

from chi_square import p_value
from oasiskv.vllm.sampler import HeldBackSampler
from plugin.probe import NGRAM, probed

DRAWS, AT_ONCE = 2000, 100
ALLOWED = list(range(3, 11))
"""Eight tokens, so that two of them are 64 cells; and n-gram drafts are often right."""
SIGNIFICANCE = 1e-3
"""The seed is fixed: a right engine passes or fails for ever, and wrong ones fall far below."""


def prompt():
    """Tokens among those allowed, with every pair among them: there always is a draft."""
    generator = torch.Generator().manual_seed(3)
    return [ALLOWED[i] for i in torch.randint(len(ALLOWED), (50,), generator=generator).tolist()]


def expand(values, cu_num_tokens, num_tokens, replace_from=0, replace_to=0):
    """What vLLM's ``expand_batch_to_tokens`` is to do: one value a draft from one a request."""
    counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1)).long()
    values = torch.where(values == replace_from, torch.full_like(values, replace_to), values)
    return values.repeat_interleave(counts, output_size=num_tokens)


@pytest.fixture(autouse=True)
def temperatures_reach_drafts(monkeypatch):
    """On the CPU vLLM (0.28, 0.32) takes the temperatures of drafts from memory nobody wrote.

    vllm-project/vllm issue 55005; the plugin is not involved and other devices are right.
    """
    monkeypatch.setattr(rejection_sampler, "expand_batch_to_tokens", expand)


@pytest.fixture(scope="module")
def distribution(tiny_folder):
    """P(second token = j, first = i) by transformers, over the tokens allowed."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    rows = torch.tensor([[*prompt(), token] for token in ALLOWED])
    with torch.inference_mode():
        logits = model(rows).logits[:, -2:, ALLOWED].double().softmax(-1)
    return logits[0, 0][:, None] * logits[:, 1]


@pytest.fixture(scope="module")
def probe(tiny_folder, distribution):
    with probed(
        tiny_folder,
        refetch=False,
        max_num_seqs=AT_ONCE,
        num_gpu_blocks_override=1600,
        speculative_config=NGRAM,
        settings={"lookahead": "held_back", "hot_tokens": 64},
    ) as probe:
        yield probe


def sampled(probe, fed, draws=DRAWS):
    """Counts ``[allowed, allowed]`` of the first two new tokens; ``fed`` takes drafts and gains."""
    counts = torch.zeros(len(ALLOWED), len(ALLOWED))
    probe.runtime.observer = lambda record: fed.append((len(record.drafts), len(record.accepted)))
    # The second token comes from a step with drafts: it is one of them, or sampled.
    sampling = SamplingParams(
        n=AT_ONCE,
        temperature=1.0,
        max_tokens=3,
        ignore_eos=True,
        detokenize=False,
        allowed_token_ids=ALLOWED,
    )
    # A seed of a request does not go with drafts on vLLM's CPU build.
    torch.manual_seed(1)
    for _ in range(draws // AT_ONCE):
        [output] = probe.llm.generate([{"prompt_token_ids": prompt()}], sampling, use_tqdm=False)
        for draw in output.outputs:
            first, second = (ALLOWED.index(token) for token in draw.token_ids[:2])
            counts[first, second] += 1
    probe.runtime.observer = None
    return counts


def test_two_tokens_at_temperature_1_follow_the_target(probe, distribution, monkeypatch):
    held = []
    right = HeldBackSampler.__call__

    def counting(self, metadata, *others):
        held.extend(n for n in metadata.num_draft_tokens if n)
        return right(self, metadata, *others)

    monkeypatch.setattr(HeldBackSampler, "__call__", counting)
    fed = []
    counts = sampled(probe, fed)
    assert int(counts.sum()) == DRAWS
    assert p_value(counts, distribution) > SIGNIFICANCE
    assert len(held) == sum(drafts > 0 for drafts, _ in fed) >= DRAWS
    assert set(held) == {1, 2, 3}
    # Some drafts are right, those held back are never accepted.
    assert max(gained for _, gained in fed) == 3
    assert all(gained <= max(1, drafts) for drafts, gained in fed)
    assert len(probe.sparse) == DRAWS
    probe.assert_all_back()


def test_the_chi_square_sees_drafts_that_are_accepted_too_often(probe, distribution, monkeypatch):
    """Taking the first draft whatever the target says, one time in five, is noticed."""
    calls = iter(range(10**9))
    right = HeldBackSampler.__call__

    def wrong(self, metadata, *others):
        output = right(self, metadata, *others)
        drafts = metadata.draft_token_ids.split(metadata.num_draft_tokens)
        for row, ids in zip(output.sampled_token_ids, drafts, strict=True):
            if len(ids) and next(calls) % 5 == 0:
                row[0], row[1:] = ids[0], -1
        return output

    monkeypatch.setattr(HeldBackSampler, "__call__", wrong)
    assert p_value(sampled(probe, [], 500), distribution) < SIGNIFICANCE
