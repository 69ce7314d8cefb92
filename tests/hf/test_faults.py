"""Late, repeated, foreign and lost completions; aborts at every stage; a full store."""

import pytest

from oasiskv.config import OasisConfig
from oasiskv.core.pipeline import Stage
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.errors import ConfigError, PromptError, StoreFullError, TransferError
from oasiskv.hf import Engine
from oasiskv.hf.request import Phase
from oasiskv.stores.host import HostStore
from oasiskv.testing.faulty_store import FaultyStore
from oasiskv.testing.refetch import ForcedRefetch
from tiny import prompt_of, same_up_to_ties, stock_greedy, stock_llama, tiny_llama

CONFIG = OasisConfig(
    budget_tokens=32,
    hot_tokens=48,
    sink_tokens=16,
    window_tokens=16,
    cap_fraction=1.0,
    prefill_tokens=50,
    transfer_timeout_s=0.2,
)
WHOLE = CONFIG.model_copy(update={"hot_tokens": 256, "threshold_tokens": 0})


def assert_all_given_back(engine):
    store, digests = engine.tiering.store, engine.tiering.digests
    assert store.free_blocks == store.capacity_blocks
    assert digests.rows_used == 0
    assert engine.tiering.draining == 0
    assert engine.fast_tier_kv_bytes == 0
    assert all(not request.kv.layers for request in engine.requests.values())


@pytest.mark.parametrize("seed", range(4))
def test_completions_late_twice_out_of_order_and_foreign_change_nothing(seed):
    loaded = tiny_llama()
    store = FaultyStore(loaded.geometry, 60, seed=seed)
    engine = Engine(loaded, WHOLE, store=store, drafts=NgramDrafts())
    engine.before_step = ForcedRefetch(seed)
    prompts = [prompt_of(length, seed=seed) for length in (90, 100, 131)]
    for prompt, tokens in zip(prompts, engine.generate(prompts, 20), strict=True):
        expected, logits = stock_greedy(stock_llama(), prompt, 20)
        assert same_up_to_ties(tokens, expected, logits)
    assert engine.tiering.ignored > 0
    engine.tiering.drain()
    assert_all_given_back(engine)


@pytest.mark.parametrize("seed", range(3))
def test_repeated_completions_of_a_small_hot_set_never_free_a_slot_too_early(seed):
    loaded = tiny_llama()
    store = FaultyStore(loaded.geometry, 60, seed=seed, repeat=1.0)
    engine = Engine(loaded, CONFIG, store=store, drafts=NgramDrafts())
    engine.before_step = ForcedRefetch(seed)
    engine.generate([prompt_of(200), prompt_of(300)], 30)
    assert engine.tiering.ignored > 0


@pytest.mark.parametrize("seed", range(3))
def test_sparse_output_does_not_depend_on_when_completions_come(seed):
    loaded = tiny_llama()
    outputs = []
    for store in (HostStore(loaded.geometry, 60), FaultyStore(loaded.geometry, 60, seed=seed)):
        engine = Engine(loaded, CONFIG, store=store, drafts=NgramDrafts())
        outputs.append(engine.generate([prompt_of(200), prompt_of(300)], 40))
        assert sum(s.fetched for r in engine.requests.values() for s in r.stats.traffic) > 0
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_lost_completion_fails_its_request_and_no_other(kind):
    loaded = tiny_llama()

    def lost(ticket):
        return ticket.request_id == "unlucky" and ticket.kind == kind

    store = FaultyStore(loaded.geometry, 60, lose=lost)
    engine = Engine(loaded, CONFIG, store=store)
    engine.submit("lucky", prompt_of(200), 40)
    engine.submit("unlucky", prompt_of(250), 40)
    errors = {output.request_id: output.error for output in engine.stream() if output.error}
    assert set(errors) == {"unlucky"}
    assert isinstance(errors["unlucky"], TransferError)
    assert "transfer_timeout_s" in str(errors["unlucky"])
    assert engine.requests["lucky"].phase is Phase.FINISHED
    assert engine.requests["unlucky"].phase is Phase.FAILED
    engine.tiering.drain(engine.requests["lucky"])
    # What may still be written to or read from is kept, and only that.
    held = len(engine.requests["unlucky"].store_blocks)
    assert held > 0
    assert store.free_blocks == store.capacity_blocks - held
    assert engine.tiering.draining == 1


def test_a_block_leaves_the_window_only_when_the_store_has_it():
    """Writes are lost from some step on: the window stands still, and then the request fails."""
    loaded = tiny_llama()
    store = FaultyStore(
        loaded.geometry, 60, lose=lambda ticket: ticket.kind == "write" and ticket.step > 40
    )
    engine = Engine(loaded, CONFIG, store=store)
    request = engine.submit("a", prompt_of(200), 100)
    while request.phase.running:
        engine.step()
        assert request.acked.issuperset(range(request.kv.window_start))
    assert isinstance(request.error, TransferError)
    assert request.kv.window_start > 200 // 16, "the window never moved"


@pytest.mark.parametrize("steps", range(12))
def test_abort_at_every_stage_gives_everything_back(steps):
    loaded = tiny_llama()
    store = FaultyStore(loaded.geometry, 60, seed=steps)
    engine = Engine(loaded, CONFIG, store=store, drafts=NgramDrafts())
    engine.submit("gone", prompt_of(180), 60)
    engine.submit("stays", prompt_of(120), 20)
    for _ in range(steps):
        engine.step()
    engine.abort("gone")
    engine.abort("gone")
    engine.abort("never there")
    assert engine.requests["gone"].kv.nbytes == 0
    for output in engine.stream():
        assert output.error is None
    assert len(engine.requests["stays"].output) == 20
    engine.tiering.drain()
    assert_all_given_back(engine)


def test_abort_while_transfers_are_in_flight_then_the_same_id_again():
    loaded = tiny_llama()
    store = FaultyStore(loaded.geometry, 60, seed=5, repeat=1.0)
    config = WHOLE.model_copy(update={"hot_tokens": 32, "transfer_timeout_s": 30.0})
    engine = Engine(loaded, config, store=store)
    for _ in range(10):
        request = engine.submit("again", prompt_of(200), 60)
        while not (
            request.pipeline and any(request.pipeline.stage(i) is Stage.IN_FLIGHT for i in (0, 1))
        ):
            engine.step()
        engine.abort("again")
    engine.submit("again", prompt_of(200), 8)
    for output in engine.stream():
        assert output.error is None
    engine.tiering.drain()
    assert_all_given_back(engine)


def test_a_full_store_fails_the_newest_request_and_no_other():
    loaded = tiny_llama()
    engine = Engine(loaded, CONFIG, store=HostStore(loaded.geometry, 20))
    for name in ("first", "second", "third"):
        engine.submit(name, prompt_of(110), 50)
    errors = {output.request_id: output.error for output in engine.stream() if output.error}
    assert set(errors) == {"third"}
    assert isinstance(errors["third"], StoreFullError)
    assert "host_gib" in str(errors["third"])
    for name in ("first", "second"):
        assert len(engine.requests[name].output) == 50
    assert_all_given_back(engine)


def test_a_request_larger_than_the_store_is_refused_at_once():
    loaded = tiny_llama()
    engine = Engine(loaded, CONFIG, store=HostStore(loaded.geometry, 4))
    with pytest.raises(StoreFullError, match="host_gib"):
        engine.submit("big", prompt_of(100), 10)
    assert not engine.running


@pytest.mark.parametrize(
    ("prompt", "new", "text"),
    [
        ([], 1, "empty"),
        ([1] * 2048, 1, "allows 2048"),
        ([1] * 5000, 1, "allows 2048"),
        ([97], 1, "vocabulary"),
        ([-1], 1, "vocabulary"),
        ([1], 0, "max_new_tokens"),
    ],
)
def test_prompts_that_cannot_be_served_are_refused(prompt, new, text):
    engine = Engine(tiny_llama(), OasisConfig(mode="dense"))
    with pytest.raises(PromptError, match=text):
        engine.submit("bad", prompt, new)
    assert not engine.requests


def test_generation_ends_at_the_longest_sequence_of_the_model():
    engine = Engine(tiny_llama(), OasisConfig(mode="dense"), drafts=NgramDrafts())
    engine.submit("long", prompt_of(2040), 100)
    for output in engine.stream():
        assert output.error is None
    assert len(engine.requests["long"].tokens) == 2048


def test_mode_under_pressure_is_refused():
    config = CONFIG.model_copy(update={"mode": "under_pressure"})
    with pytest.raises(ConfigError, match=r"^mode=under_pressure .* 'always' or 'dense'$"):
        Engine(tiny_llama(), config)


def test_an_id_in_use_is_refused():
    engine = Engine(tiny_llama(), OasisConfig(mode="dense"))
    engine.submit("twice", [1], 4)
    with pytest.raises(PromptError, match="in use"):
        engine.submit("twice", [1], 4)
