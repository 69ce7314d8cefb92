"""Methods that are compared, each at the same number of attended tokens.

A method is given K, the budget. OasisKV keeps S = K * 3/2 tokens in slots and attends to all of
them; every other method chooses S tokens, so that all attend to sink + S + window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.drafts.base import DraftSource, NoDrafts
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.evals.masked import MaskedDecoder
from oasiskv.evals.policies import (
    Dense,
    ExactTop,
    Policy,
    Quest,
    RandomBlocks,
    Replay,
    Stale,
    WindowOnly,
)
from oasiskv.hf.engine import Engine, StepRecord
from oasiskv.hf.loading import LoadedModel
from oasiskv.hf.prefill import Prefilled
from oasiskv.stores.host import HostStore

HOT_OVER_BUDGET = 1.5
MEASURE_EVERY = 16
"""Rows between two of which recall and mass are measured."""


@dataclass(frozen=True)
class Decoded:
    """What a method gave on one prompt.

    Args:
        tokens: decoded after the forced ones.
        logits: ``[forced + decoded, vocabulary]`` float32, row i predicts token i.
        moved_bytes: mean bytes store -> fast tier of a step; what a policy would have to move.
        mass: ``[layers, KV heads]`` share of true attention that was attended to; empty if none was
            measured.
        recall: the same of the best blocks.
        agreement: share of the predicted blocks that the step's own query would have chosen; None
            where nothing is predicted.
        misses: wanted blocks that were in no slot, as a share of those wanted; None likewise.
    """

    tokens: list[int]
    logits: Tensor
    moved_bytes: float
    mass: Tensor
    recall: Tensor
    agreement: float | None = None
    misses: float | None = None


def config_of(budget_tokens: int) -> OasisConfig:
    """Settings of OasisKV at one budget; everything else is the default."""
    hot = int(budget_tokens * HOT_OVER_BUDGET) // BLOCK_TOKENS * BLOCK_TOKENS
    return OasisConfig(budget_tokens=budget_tokens, hot_tokens=hot)


@dataclass(frozen=True)
class Method:
    """One method.

    Args:
        name: its name in tables.
        doc: what it is, one line.
        policy: of S blocks and a seed, for those that choose in the same step.
        lookahead: OasisKV's mode; None for policies.
        drafts: of the model, the prompt and what follows it; None for policies.
    """

    name: str
    doc: str
    policy: Callable[[int, int], Policy] | None = None
    lookahead: LookaheadMode | None = None
    drafts: Callable[[LoadedModel, Sequence[int], Sequence[int]], DraftSource] | None = None

    def decode(
        self,
        loaded: LoadedModel,
        prefilled: Prefilled,
        prompt: Sequence[int],
        forced: Sequence[int],
        new_tokens: int,
        budget_tokens: int,
        expected: Sequence[int],
        seed: int = 0,
    ) -> Decoded:
        """Decode known tokens, then greedy ones.

        Args:
            loaded: the model.
            prefilled: the prompt but its last tokens.
            prompt: all of it.
            forced: tokens that are decoded whatever the model says.
            new_tokens: further ones that it chooses.
            budget_tokens: K.
            expected: what is expected to follow ``forced``; the oracle's drafts.
            seed: of what is random.
        """
        run = _run_policy if self.policy is not None else _run_engine
        return run(
            self, loaded, prefilled, prompt, forced, new_tokens, config_of(budget_tokens),
            expected, seed,
        )  # fmt: skip


def _ngram(_loaded: LoadedModel, _prompt: Sequence[int], _follows: Sequence[int]) -> DraftSource:
    return NgramDrafts()


def _oracle(_loaded: LoadedModel, prompt: Sequence[int], follows: Sequence[int]) -> DraftSource:
    return OracleDrafts({_NAME: list(follows)}, {_NAME: len(prompt)})


def _none(_loaded: LoadedModel, _prompt: Sequence[int], _follows: Sequence[int]) -> DraftSource:
    return NoDrafts()


_NAME = "eval"
DENSE = "dense"
"""The method that all others are compared with."""

METHODS = {
    method.name: method
    for method in (
        Method(DENSE, "everything", policy=lambda count, seed: Dense(count)),
        Method("exact", "same step, exact keys", policy=lambda count, seed: ExactTop(count)),
        Method("quest", "Quest, same step", policy=lambda count, seed: Quest(count)),
        Method(
            "oasis-oracle",
            "OasisKV, drafts that are right, the last held back",
            lookahead=LookaheadMode.HELD_BACK,
            drafts=_oracle,
        ),
        Method(
            "oasis-ngram",
            "OasisKV, n-gram drafts, the last held back",
            lookahead=LookaheadMode.HELD_BACK,
            drafts=_ngram,
        ),
        Method(
            "oasis-none",
            "OasisKV, no drafts: the last accepted token's query",
            lookahead=LookaheadMode.LAST_ACCEPTED,
            drafts=_none,
        ),
        Method(
            "oasis-paper",
            "OasisKV as in the paper: one draft, looked at and rejected; n-gram",
            lookahead=LookaheadMode.PAPER,
            drafts=_ngram,
        ),
        Method("stale", "the last token's query, no hot set", policy=lambda c, seed: Stale(c)),
        Method("window", "sink and a longer window", policy=lambda c, seed: WindowOnly(c)),
        Method("random", "random blocks", policy=lambda count, seed: RandomBlocks(count, seed)),
    )
}


def _run_policy(
    method: Method,
    loaded: LoadedModel,
    prefilled: Prefilled,
    prompt: Sequence[int],
    forced: Sequence[int],
    new_tokens: int,
    config: OasisConfig,
    _expected: Sequence[int],
    seed: int,
) -> Decoded:
    assert method.policy is not None
    total = len(prompt) + len(forced) + new_tokens
    policy = method.policy(config.hot_blocks, seed)
    decoder = MaskedDecoder(loaded, prefilled, policy, config, total, MEASURE_EVERY)
    logits = [decoder.forward(prompt[len(prefilled.tokens) :], dense=True)[-1:]]
    if forced:
        logits.append(decoder.forward(forced))
    tokens: list[int] = []
    while len(tokens) < new_tokens:
        tokens.append(int(logits[-1][-1].argmax()))
        if len(tokens) < new_tokens:
            logits.append(decoder.forward(tokens[-1:]))
    count = len(forced) + new_tokens
    sums, rows = decoder.sums, max(1, decoder.sums.rows)
    tile = loaded.geometry.tile_bytes
    return Decoded(
        tokens=tokens,
        logits=torch.cat(logits)[:count],
        moved_bytes=sums.moved_tiles * tile / max(1, sums.moved_rows),
        mass=sums.mass / rows if sums.rows else sums.mass[:0],
        recall=sums.recall / rows if sums.rows else sums.recall[:0],
    )


def _run_engine(
    method: Method,
    loaded: LoadedModel,
    prefilled: Prefilled,
    prompt: Sequence[int],
    forced: Sequence[int],
    new_tokens: int,
    config: OasisConfig,
    expected: Sequence[int],
    _seed: int,
) -> Decoded:
    assert method.drafts is not None
    config = config.model_copy(update={"lookahead": method.lookahead})
    follows = [*forced, *expected]
    count = len(forced) + new_tokens
    store = HostStore(loaded.geometry, loaded.geometry.blocks_for(len(prompt) + count))
    engine = Engine(
        loaded, config, store, method.drafts(loaded, prompt, follows), agreement_every=8
    )
    replay = Replay()
    logits: list[Tensor] = []

    def hold(engine: Engine) -> None:
        for request in engine.running:
            if request.residents is not None:
                held = request.residents.blocks[..., : request.residents.filled].clone()
                for row in range(1 + config.draft_tokens):
                    replay.blocks[request.computed + row] = held

    def keep(record: StepRecord) -> None:
        logits.append(record.logits[: len(record.accepted)])

    engine.before_step, engine.observer = hold, keep
    request = engine.submit(_NAME, prompt, count, forced=forced, prefilled=prefilled)
    engine.run()
    tokens = request.output[len(forced) :]
    stats = request.stats
    wanted = sum(step.wanted for step in stats.traffic)
    mass, recall = _measure(loaded, prefilled, prompt, request.output, replay, config)
    return Decoded(
        tokens=tokens,
        logits=torch.cat(logits)[:count],
        moved_bytes=sum(s.fetched_bytes for s in stats.traffic) / max(1, len(stats.traffic)),
        mass=mass,
        recall=recall,
        agreement=sum(stats.agreement) / len(stats.agreement) if stats.agreement else None,
        misses=sum(int(s.misses.sum()) for s in stats.traffic) / wanted if wanted else None,
    )


def _measure(
    loaded: LoadedModel,
    prefilled: Prefilled,
    prompt: Sequence[int],
    output: Sequence[int],
    replay: Replay,
    config: OasisConfig,
) -> tuple[Tensor, Tensor]:
    """Mass and recall of an engine's run, by doing it again with what it held."""
    if not replay.blocks:
        return torch.zeros(0), torch.zeros(0)
    total = len(prompt) + len(output)
    decoder = MaskedDecoder(loaded, prefilled, replay, config, total, MEASURE_EVERY)
    decoder.forward(prompt[len(prefilled.tokens) :], dense=True)
    decoder.forward(output[:-1])
    sums = decoder.sums
    if not sums.rows:
        return torch.zeros(0), torch.zeros(0)
    return sums.mass / sums.rows, sums.recall / sums.rows
