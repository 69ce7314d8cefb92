"""With a hot set as large as the context the sparse path gives the stock engine's output.

Blocks really leave the fast tier, and before each step a random half of the hot set is lost and
fetched again in another order.
"""

import weakref

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.drafts.assistant import AssistantDrafts
from oasiskv.drafts.base import NoDrafts
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.hf import Engine, wrap_model
from oasiskv.stores.host import HostStore
from oasiskv.testing.refetch import ForcedRefetch
from tiny import (
    make_model,
    prompt_of,
    same_up_to_ties,
    stock_greedy,
    stock_llama,
    tiny_llama,
)

NEW = 24
LENGTHS = [7, 16, 32, 64, *range(96, 112), 128, 160]


def whole_context_config(**settings) -> OasisConfig:
    """Sparse from the first decode step, slots for any context of these tests."""
    return OasisConfig(
        **{
            "budget_tokens": 64,
            "hot_tokens": 256,
            "sink_tokens": 16,
            "window_tokens": 16,
            "threshold_tokens": 0,
            "prefill_tokens": 64,
            **settings,
        }
    )


class LogitsLog:
    """Collects the logits behind every token of every request."""

    def __init__(self):
        self.rows: dict[str, list[torch.Tensor]] = {}

    def __call__(self, record):
        rows = self.rows.setdefault(record.request.request_id, [])
        rows.extend(record.logits[: len(record.accepted)])


def run(loaded, prompts, config, drafts, new=NEW):
    """Decode under forced refetch; checks that the sparse path was really taken."""
    store = HostStore(loaded.geometry, 24 * len(prompts))
    engine = Engine(loaded, config, store=store, drafts=drafts)
    refetch, log = ForcedRefetch(seed=1), LogitsLog()
    engine.before_step, engine.observer = refetch, log
    ids = [str(index) for index in range(len(prompts))]
    requests = [engine.submit(i, p, new) for i, p in zip(ids, prompts, strict=True)]
    dense = {
        r.request_id: [weakref.ref(r.kv.layers[i]) for i in r.kv.full_layers] for r in requests
    }
    for output in engine.stream():
        assert output.error is None
        for request in engine.running:
            if request.residents is not None:
                first = config.sink_blocks
                request.residents.check(first, max(first, request.kv.window_start))
                left = [tensor for tensor in dense[request.request_id] if tensor() is not None]
                assert not left, "the dense KV was not given back at the transition"
    for request in requests:
        assert request.residents is not None, "the request never went sparse"
    if any(len(prompt) + new > 80 for prompt in prompts):
        assert refetch.evicted_tiles > 0
        assert refetch.fetched_bytes > 0
    return [r.output for r in requests], [torch.stack(log.rows[i])[:new] for i in ids]


def assert_parity(stock, prompts, outputs, logits, new=NEW):
    for prompt, tokens, ours in zip(prompts, outputs, logits, strict=True):
        expected, theirs = stock_greedy(stock, prompt, new)
        assert same_up_to_ties(tokens, expected, theirs), f"prompt of {len(prompt)} tokens"
        if tokens == expected:
            assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("drafts", [NoDrafts, NgramDrafts])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_length_alone(length, drafts):
    prompts = [prompt_of(length)]
    outputs, logits = run(tiny_llama(), prompts, whole_context_config(), drafts())
    assert_parity(stock_llama(), prompts, outputs, logits)


@pytest.mark.parametrize("mode", list(LookaheadMode))
@pytest.mark.parametrize("drafts", [NoDrafts, NgramDrafts])
@pytest.mark.parametrize("first", range(0, len(LENGTHS), 4))
def test_four_lengths_in_one_batch_in_each_lookahead_mode(first, drafts, mode):
    prompts = [prompt_of(length, seed=1) for length in (LENGTHS * 2)[first : first + 4]]
    config = whole_context_config(lookahead=mode)
    outputs, logits = run(tiny_llama(), prompts, config, drafts())
    assert_parity(stock_llama(), prompts, outputs, logits)


@pytest.mark.parametrize("draft_tokens", [1, 15, 16, 17])
def test_draft_counts_around_the_block(draft_tokens):
    prompts = [prompt_of(length, seed=3) for length in (100, 112)]
    config = whole_context_config(draft_tokens=draft_tokens)
    outputs, logits = run(tiny_llama(), prompts, config, NgramDrafts())
    assert_parity(stock_llama(), prompts, outputs, logits)


def test_drafts_of_an_assistant():
    prompts = [prompt_of(length, seed=4) for length in (90, 121)]
    drafts = AssistantDrafts(stock_llama(), tiny_llama().vocab_size)
    outputs, logits = run(tiny_llama(), prompts, whole_context_config(), drafts)
    assert_parity(stock_llama(), prompts, outputs, logits)


@pytest.mark.parametrize("digest", ["minmax", "keys4"])
@pytest.mark.parametrize("prefill_tokens", [1, 17, 512])
def test_prefill_in_parts_and_each_digest(prefill_tokens, digest):
    prompts = [prompt_of(length, seed=5) for length in (99, 127)]
    config = whole_context_config(prefill_tokens=prefill_tokens, digest=digest)
    outputs, logits = run(tiny_llama(), prompts, config, NgramDrafts())
    assert_parity(stock_llama(), prompts, outputs, logits)


def test_transition_in_mid_decode():
    prompts = [prompt_of(length, seed=6) for length in (95, 110)]
    config = whole_context_config(threshold_tokens=115)
    outputs, logits = run(tiny_llama(), prompts, config, NgramDrafts())
    assert_parity(stock_llama(), prompts, outputs, logits)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(12, 2, 64), (28, 4, 80), (8, 1, 96), (4, 4, 128)]
)
def test_families_heads_and_dims(family, heads, kv_heads, head_dim):
    stock = make_model(family, heads, kv_heads, head_dim)
    loaded = wrap_model(make_model(family, heads, kv_heads, head_dim))
    prompts = [prompt_of(length, seed=7) for length in (100, 113)]
    outputs, logits = run(loaded, prompts, whole_context_config(), NgramDrafts(), new=8)
    assert_parity(stock, prompts, outputs, logits, new=8)


def test_sliding_window_layers_stay_as_they_are():
    settings = {
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 40,
        "max_window_layers": 1,
    }
    stock = make_model("qwen2", **settings)
    loaded = wrap_model(make_model("qwen2", **settings))
    assert loaded.sliding_windows == (None, 40, 40)
    prompts = [prompt_of(length, seed=8) for length in (30, 100, 150)]
    outputs, logits = run(loaded, prompts, whole_context_config(prefill_tokens=33), NgramDrafts())
    assert_parity(stock, prompts, outputs, logits)


def test_dense_mode_is_the_stock_engine():
    prompts = [prompt_of(length, seed=9) for length in (7, 100)]
    engine = Engine(tiny_llama(), OasisConfig(mode="dense"), drafts=NgramDrafts())
    for prompt, tokens in zip(prompts, engine.generate(prompts, NEW), strict=True):
        expected, logits = stock_greedy(stock_llama(), prompt, NEW)
        assert same_up_to_ties(tokens, expected, logits)
