"""Lanes decode as the engine does, whatever else is decoded beside them."""

from dataclasses import replace

import pytest
import torch

from oasiskv.config import OasisConfig
from oasiskv.drafts.assistant import AssistantDrafts
from oasiskv.drafts.base import NoDrafts
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.errors import ConfigError, PromptError
from oasiskv.evals.lanes.asked import Asked
from oasiskv.evals.lanes.decode import LaneDecoder
from oasiskv.evals.lanes.kv import NOWHERE
from oasiskv.evals.methods import ASSISTED, METHODS, Setting
from oasiskv.hf import Engine
from oasiskv.hf.prefill import prefill
from oasiskv.stores.host import HostStore
from tiny import make_model, prompt_of, tiny_llama

CONFIG = OasisConfig(budget_tokens=64, hot_tokens=96, window_tokens=32)
SMALL = OasisConfig(budget_tokens=32, hot_tokens=48, window_tokens=32)
# Every residue of the block among prompt lengths and ends; the second is longer by two blocks.
PROMPTS = (prompt_of(300), prompt_of(333, seed=8))
FORCED = (prompt_of(70, seed=5), prompt_of(61, seed=6))


def _oracle(prompt, follows):
    return OracleDrafts({"a": follows}, {"a": len(prompt)})


DRAFTS = {
    "oasis-none": lambda prompt, follows: NoDrafts(),
    "oasis-ngram": lambda prompt, follows: NgramDrafts(),
    "oasis-paper": lambda prompt, follows: NgramDrafts(),
    "oasis-oracle": _oracle,
    "oasis-oracle1": _oracle,
    "oasis-oracle1-plain": _oracle,
    "oasis-oracle1-free": _oracle,
}
# Without a second model.
ALONE = [name for name, method in METHODS.items() if name != ASSISTED and not method.ablation]
POLICIES = [name for name, method in METHODS.items() if method.policy is not None]


def setting(name, config=CONFIG):
    method = METHODS[name]
    own = {"lookahead": method.lookahead, **dict(method.settings)}
    return Setting(method, config.model_copy(update=own))


def ask(index=0, forced=None, new=0, **given):
    prompt = PROMPTS[index]
    own = FORCED[index] if forced is None else forced
    return Asked(str(index), prefill(tiny_llama(), prompt), prompt, own, new, **given)


def decode(asked, settings, **given):
    decoder = LaneDecoder(tiny_llama(), asked, settings, keep_log_probs=True, **given)
    return decoder.run()


def engine_run(name, config, asked):
    """Logits, blocks held before each step, tokens and traffic of the reference engine."""
    loaded = tiny_llama()
    store = HostStore(loaded.geometry, 64)
    follows = [*asked.forced, *asked.expected]
    config = setting(name, config).config
    engine = Engine(loaded, config, store, DRAFTS[name](asked.prompt, follows), agreement_every=8)
    held, logits = [], []

    def hold(engine):
        [request] = engine.running
        if request.residents is not None:
            held.append(request.residents.blocks.clone())

    engine.before_step = hold
    engine.observer = lambda record: logits.append(record.logits[: len(record.accepted)])
    request = engine.submit(
        "a", asked.prompt, asked.limit, forced=asked.forced, prefilled=asked.prefilled
    )
    engine.run()
    return torch.cat(logits)[: asked.limit].log_softmax(-1), held, request


def held_by_lanes(decoder, question, name):
    """Blocks in slots, sorted, ``[layers, heads, slots]``."""
    lane = [each.method.name for each in decoder.settings].index(name)
    [(lanes, hot_sets)] = [each for each in decoder.hot_sets if lane in each[0]]
    mask = hot_sets.mask[:, question, lane - lanes.start]
    blocks = decoder.block_of[question]
    return torch.where(mask, blocks, NOWHERE).sort(-1).values[..., : CONFIG.hot_blocks]


@pytest.mark.parametrize("name", DRAFTS)
def test_a_lane_is_the_engine(name):
    """Beside all other methods and another prompt: tokens, logits, slots and traffic."""
    asked = [ask(0, new=9), ask(1, new=5)]
    asked = [replace(each, expected=prompt_of(9, seed=3)) for each in asked]
    settings = [setting(each) for each in {*ALONE, name}]
    decoder = LaneDecoder(tiny_llama(), asked, settings, keep_log_probs=True)
    steps = [[], []]
    while True:
        now = [held_by_lanes(decoder, q, name) for q in range(2)]
        if not decoder.round():
            break
        for q in range(2):
            steps[q].append(now[q])
    results = decoder.results()
    for q, one in enumerate(asked):
        logits, held, request = engine_run(name, CONFIG, one)
        found = results[q][setting(name)]
        assert request.output == [*one.forced, *found.tokens]
        assert torch.allclose(found.log_probs, logits, atol=1e-4)
        # The longer question goes on after the other has ended.
        assert len(held) <= len(steps[q])
        assert len(held) > 15
        for ours, theirs in zip(steps[q], held, strict=False):
            assert torch.equal(ours, theirs.sort(-1).values)
        traffic = request.stats.traffic
        assert found.moved_bytes == sum(s.fetched_bytes for s in traffic) / len(traffic)
        wanted = sum(step.wanted for step in traffic)
        assert found.misses == sum(int(s.misses.sum()) for s in traffic) / wanted
        mean = sum(request.stats.agreement) / len(request.stats.agreement)
        assert found.agreement == pytest.approx(mean, abs=1e-5)


def test_what_is_beside_a_lane_changes_nothing():
    asked = [ask(0, new=3), ask(1)]
    settings = [setting(name, config) for name in ALONE for config in (CONFIG, SMALL)]
    together = decode(asked, settings)
    for q, one in enumerate(asked):
        # Each method alone with both configurations, one of them on each question.
        for each in settings[q::2]:
            [alone] = decode([one], [each])
            ours, theirs = together[q][each], alone[each]
            assert ours.tokens == theirs.tokens
            assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1e-4), each
            assert ours.moved_bytes == pytest.approx(theirs.moved_bytes)
            assert (ours.misses, ours.agreement) == pytest.approx((theirs.misses, theirs.agreement))
            if ours.mass is not None:
                assert torch.allclose(ours.mass, theirs.mass, atol=1e-5)
                assert torch.allclose(ours.recall, theirs.recall, atol=1e-5)


@pytest.mark.parametrize("name", POLICIES)
def test_all_at_once_or_one_by_one(name, monkeypatch):
    [at_once] = decode([ask()], [setting(name)])
    monkeypatch.setattr("oasiskv.evals.lanes.setup.KNOWN_ROWS", 1)
    [one_by_one] = decode([ask()], [setting(name)])
    ours, theirs = at_once[setting(name)], one_by_one[setting(name)]
    assert torch.allclose(ours.log_probs, theirs.log_probs, atol=1e-4)
    assert ours.moved_bytes == theirs.moved_bytes


def test_everything_chosen_is_dense():
    [found] = decode([ask()], [setting("dense")])
    # Without the mask.
    model = tiny_llama().model
    model.set_attn_implementation("sdpa")
    try:
        with torch.no_grad():
            logits = model(torch.tensor([PROMPTS[0] + FORCED[0]])).logits[0, len(PROMPTS[0]) - 1 :]
    finally:
        model.set_attn_implementation("oasiskv")
    expected = logits[:-1].log_softmax(-1)
    assert torch.allclose(found[setting("dense")].log_probs, expected, atol=1e-4)


def test_greedy_tokens_of_dense_are_the_engines():
    engine = Engine(tiny_llama(), OasisConfig(mode="dense"))
    [expected] = engine.generate([PROMPTS[0]], 20)
    [found] = decode([ask(forced=[], new=20)], [setting("dense")])
    assert found[setting("dense")].tokens == expected


def test_a_stop_ends_an_answer_but_not_what_is_forced():
    [found] = decode([ask(forced=[], new=20)], [setting("dense")])
    tokens = found[setting("dense")].tokens
    stop = tokens[5]
    first = tokens.index(stop)
    [ended] = decode([ask(forced=[], new=20, stops=frozenset([stop]))], [setting("dense")])
    assert ended[setting("dense")].tokens == tokens[: first + 1]
    [forced] = decode([ask(forced=[stop] * 3, new=0, stops=frozenset([stop]))], [setting("dense")])
    assert len(forced[setting("dense")].log_probs) == 3


def test_comparison_with_dense():
    [dense] = decode([ask()], [setting("dense")])
    reference = dense[setting("dense")].log_probs
    names = ("oasis-none", "random", "dense")
    [found] = decode([ask(log_probs=reference)], [setting(name) for name in names])
    tokens = torch.tensor(FORCED[0])
    for name in names:
        one = found[setting(name)]
        kl = (reference.exp() * (reference - one.log_probs)).sum(-1)
        assert torch.allclose(torch.tensor(one.kl), kl, atol=1e-5)
        nll = -one.log_probs.gather(-1, tokens[:, None])[:, 0]
        assert torch.allclose(torch.tensor(one.nll), nll, atol=1e-5)
        assert one.same == (one.log_probs.argmax(-1) == reference.argmax(-1)).tolist()
    assert sum(found[setting("dense")].kl) == pytest.approx(0, abs=1e-4)
    assert sum(found[setting("random")].kl) > 0.1


def test_recall_and_mass(monkeypatch):
    monkeypatch.setattr("oasiskv.evals.lanes.decode.MEASURE_EVERY", 1)
    [found] = decode([ask()], [setting(name) for name in ALONE])
    exact, other, oasis = (found[setting(name)] for name in ("exact", "random", "oasis-none"))
    assert torch.equal(exact.recall, torch.ones(2, 2))
    assert bool((other.recall < 0.7).all())
    assert bool((other.mass < exact.mass).all())
    assert other.mass.mean() < oasis.mass.mean() < exact.mass.mean()
    assert bool((exact.mass < 1).all())
    assert found[setting("dense")].mass is None


def test_mass_of_a_row_by_hand(monkeypatch):
    """A window of everything there is but one block: what is missing is that block's attention."""
    monkeypatch.setattr("oasiskv.evals.lanes.decode.MEASURE_EVERY", 1)
    config = CONFIG.model_copy(update={"hot_tokens": 14 * 16})
    one = ask(forced=[7, 7])
    [found] = decode([one], [setting("window", config)])
    # 300 tokens: 18 blocks closed, of which 2 are the window and 1 the sink; 15 candidates, so that
    # block 1 is left out.
    model = tiny_llama().model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            out = model(torch.tensor([[*one.prompt, 7]]), output_attentions=True)
    finally:
        model.set_attn_implementation("oasiskv")
    weights = out.attentions[0][0, :, -1]
    missing = weights[:, 16:32].sum(-1).reshape(2, -1).mean(-1)
    assert torch.allclose(found[setting("window", config)].mass[0], 1 - missing, atol=1e-5)


def test_moves_are_what_was_not_chosen_before():
    [found] = decode([ask()], [setting("window")])
    # The window's end moves on by one block every 16 tokens, from 300 to 368: 5 times, in 2 layers
    # of 2 heads, over the 69 tokens that are decoded; the first has none before it.
    tile = tiny_llama().geometry.tile_bytes
    assert found[setting("window")].moved_bytes == pytest.approx(5 * 4 * tile / 68)


def test_the_oracle_is_the_lookahead_whose_drafts_are_right():
    modes = {method.lookahead for method in METHODS.values() if method.policy is None}
    assert modes == set(LookaheadMode)
    [found] = decode([ask()], [setting("oasis-oracle"), setting("oasis-none")])
    assert found[setting("oasis-oracle")].agreement > found[setting("oasis-none")].agreement


def test_an_assistants_drafts_are_made_once_for_all_lanes():
    places = []

    class Counted(AssistantDrafts):
        def propose(self, request_id, tokens, max_drafts):
            places.append((request_id, tuple(tokens)))
            return super().propose(request_id, tokens, max_drafts)

    drafts = Counted(make_model(), tiny_llama().vocab_size)
    settings = [setting(ASSISTED, config) for config in (CONFIG, SMALL)]
    asked = [ask(0, forced=[], new=12), ask(1)]
    alone = []
    for each in settings:
        decode(asked, [each], assistant=drafts)
        alone.append(set(places))
        places.clear()
    found = decode(asked, settings, assistant=drafts)
    assert sorted(places) == sorted(alone[0] | alone[1])
    assert len(places) < len(alone[0]) + len(alone[1])
    assert all(one[each].agreement is not None for one in found for each in settings)
    with pytest.raises(ConfigError, match="needs an assistant model"):
        decode(asked, settings)


def test_a_method_has_its_own_settings():
    one, free = (Setting.of(name, 512).config for name in ("oasis-oracle1", "oasis-oracle1-free"))
    default = OasisConfig(budget_tokens=512, hot_tokens=768)
    assert one == default.model_copy(update={"draft_tokens": 1})
    limits = {"draft_tokens": 1, "cap_fraction": None, "hysteresis": 1.0}
    assert free == default.model_copy(update=limits)


def test_a_prompt_that_is_attended_to_as_a_whole_is_refused():
    config = CONFIG.model_copy(update={"hot_tokens": 256})
    with pytest.raises(PromptError, match="300 tokens, but at the largest budget 320"):
        decode([ask()], [setting("oasis-none", config)])
