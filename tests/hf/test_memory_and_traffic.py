"""The fast tier is bounded, and no step fetches more than the cap."""

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.hf import Engine
from oasiskv.stores.host import HostStore
from tiny import prompt_of, tiny_llama

CONFIG = OasisConfig(budget_tokens=64, hot_tokens=96, sink_tokens=16, window_tokens=32)


def sparse_engine(loaded, config, prompt_tokens, new, drafts=None):
    store = HostStore(loaded.geometry, (prompt_tokens + new) // 16 + 1)
    engine = Engine(loaded, config, store=store, drafts=drafts)
    engine.submit("a", prompt_of(prompt_tokens), new)
    return engine, engine.requests["a"]


@pytest.mark.parametrize("drafts", [None, NgramDrafts])
def test_fast_tier_is_constant_for_512_tokens_after_the_transition(drafts):
    loaded = tiny_llama()
    engine, request = sparse_engine(loaded, CONFIG, 400, 512, drafts and drafts())
    while request.residents is None:
        engine.step()
    geometry = loaded.geometry
    sizes = {request.kv.nbytes}
    slots = {request.kv.slot_nbytes}
    assert slots == {6 * geometry.block_bytes}
    assert request.stats.dense_kv_bytes >= 25 * geometry.block_bytes
    while request.phase.running:
        sizes.add(request.kv.nbytes)
        slots.add(request.kv.slot_nbytes)
        engine.step()
    assert len(request.output) == 512
    assert len(sizes) == 1
    assert len(slots) == 1
    # Sink, hot set, window, the open block, and room for one step's drafts.
    assert max(sizes) <= (1 + 6 + 2 + 3) * geometry.block_bytes


@pytest.mark.parametrize("digest", ["minmax", "keys4"])
def test_digests_grow_by_exactly_one_per_closed_block(digest):
    config = CONFIG.model_copy(update={"digest": digest})
    engine, request = sparse_engine(tiny_llama(), config, 203, 100)
    pool = engine.tiering.digests
    size = pool.nbytes
    while request.phase.running:
        assert pool.rows_used == request.computed // 16
        assert pool.nbytes == size
        engine.step()
    assert pool.rows_used == 0


@pytest.mark.parametrize("drafts", [None, NgramDrafts])
@pytest.mark.parametrize("cap_fraction", [0.01, 0.25, 0.5])
def test_no_step_fetches_more_than_the_cap(cap_fraction, drafts):
    loaded = tiny_llama()
    config = CONFIG.model_copy(update={"cap_fraction": cap_fraction, "hot_tokens": 64})
    engine, request = sparse_engine(loaded, config, 500, 120, drafts and drafts())
    for _ in engine.stream():
        pass
    traffic = request.stats.traffic
    geometry = loaded.geometry
    heads = geometry.num_layers * geometry.num_kv_heads
    cap_bytes = heads * config.cap_blocks * geometry.tile_bytes
    assert traffic
    assert all(step.fetched_bytes <= cap_bytes for step in traffic)
    assert all(step.fetched_bytes == step.fetched * geometry.tile_bytes for step in traffic)
    assert sum(step.fetched_bytes for step in traffic) > 0
    # The cap was what held it back, at least once.
    assert any(int(step.misses.sum()) > step.fetched for step in traffic)


def test_chosen_blocks_carry_more_attention_than_random_ones():
    """The first hot set holds the blocks that the latest queries attend to most."""
    engine, request = sparse_engine(tiny_llama(), CONFIG, 400, 4)
    captured = {}
    original = engine.tiering.selector.score

    def spy(queries, store_blocks):
        captured.setdefault("scores", original(queries, store_blocks))
        return original(queries, store_blocks)

    engine.tiering.selector.score = spy
    while request.residents is None:
        engine.step()
    scores = captured["scores"]
    held = request.residents.blocks - 1
    assert torch.allclose(
        scores.gather(-1, held).sum(-1), scores.sort(-1, descending=True).values[..., :6].sum(-1)
    )
