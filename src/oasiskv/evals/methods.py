"""Methods that are compared, each at the same number of attended tokens.

A method is given K, the budget. OasisKV keeps S = K * 3/2 tokens in slots and attends to all of
them; every other method chooses S tokens, so that all attend to sink + S + window.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.drafts.base import DraftSource, NoDrafts
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.errors import ConfigError
from oasiskv.evals.policies import (
    Dense,
    ExactTop,
    Policy,
    Quest,
    RandomBlocks,
    Stale,
    WindowOnly,
)

HOT_OVER_BUDGET = 1.5


def hot_tokens_of(budget_tokens: int) -> int:
    """S of a budget K, in whole blocks."""
    return int(budget_tokens * HOT_OVER_BUDGET) // BLOCK_TOKENS * BLOCK_TOKENS


@dataclass(frozen=True)
class Known:
    """What a draft source may be told.

    Args:
        follows: question -> what is expected after its prompt.
        prompt_tokens: question -> tokens of its prompt.
        assistant: an assistant model's drafts, shared by all lanes; None where there is no model.
    """

    follows: Mapping[str, Sequence[int]]
    prompt_tokens: Mapping[str, int]
    assistant: DraftSource | None = None


@dataclass(frozen=True)
class Method:
    """One method.

    Args:
        name: its name in tables.
        doc: what it is, one line.
        policy: of a seed, for those that choose in the same step; None for OasisKV.
        lookahead: OasisKV's mode.
        drafts: OasisKV's draft source, one for all questions.
        settings: OasisKV's settings that are not the default, by name.
        ablation: differs from another method in settings only, to tell what they cost.
    """

    name: str
    doc: str
    policy: Callable[[int], Policy] | None = None
    lookahead: LookaheadMode = LookaheadMode.LAST_ACCEPTED
    drafts: Callable[[Known], DraftSource] = lambda known: NoDrafts()
    settings: tuple[tuple[str, Any], ...] = ()
    ablation: bool = False


@dataclass(frozen=True)
class Setting:
    """A method at a budget: what one lane decodes with.

    Args:
        method: the method.
        config: OasisKV's settings; others take the number of slots from it.
    """

    method: Method
    config: OasisConfig

    @classmethod
    def of(cls, method: str, budget_tokens: int) -> "Setting":
        """One of ``METHODS`` with K = ``budget_tokens``; everything else is the default."""
        found = METHODS[method]
        config = OasisConfig(
            budget_tokens=budget_tokens,
            hot_tokens=hot_tokens_of(budget_tokens),
            lookahead=found.lookahead,
            **dict(found.settings),
        )
        return cls(found, config)


def _oracle(known: Known) -> DraftSource:
    return OracleDrafts(known.follows, known.prompt_tokens)


def _ngram(_known: Known) -> DraftSource:
    return NgramDrafts()


def _assistant(known: Known) -> DraftSource:
    if known.assistant is None:
        raise ConfigError(f"the method {ASSISTED!r} needs an assistant model, and none was given")
    return known.assistant


def _none(_known: Known) -> DraftSource:
    return NoDrafts()


_ONE_DRAFT: tuple[tuple[str, Any], ...] = (("draft_tokens", 1),)
_LIMITS: dict[str, tuple[str, tuple[tuple[str, Any], ...]]] = {
    "uncapped": ("no cap", (("cap_fraction", None),)),
    "plain": ("no hysteresis", (("hysteresis", 1.0),)),
    "free": ("no cap and no hysteresis", (("cap_fraction", None), ("hysteresis", 1.0))),
}

ASSISTED = "oasis-assistant"
"""The method that takes a second model."""
DENSE = "dense"
"""The method that all others are compared with."""

METHODS = {
    method.name: method
    for method in (
        Method(DENSE, "everything", lambda seed: Dense()),
        Method("exact", "same step, exact keys", lambda seed: ExactTop()),
        Method("quest", "Quest, same step", lambda seed: Quest()),
        Method(
            "oasis-oracle",
            "OasisKV, drafts that are right, the last held back",
            lookahead=LookaheadMode.HELD_BACK,
            drafts=_oracle,
        ),
        Method(
            "oasis-oracle1",
            "OasisKV, one draft that is right and held back: one token a step, by its own query",
            lookahead=LookaheadMode.HELD_BACK,
            drafts=_oracle,
            settings=_ONE_DRAFT,
        ),
        Method(
            "oasis-ngram",
            "OasisKV, n-gram drafts, the last held back",
            lookahead=LookaheadMode.HELD_BACK,
            drafts=_ngram,
        ),
        Method(
            ASSISTED,
            "OasisKV, drafts of another model, the last held back",
            lookahead=LookaheadMode.HELD_BACK,
            drafts=_assistant,
        ),
        Method("oasis-none", "OasisKV, no drafts: the last accepted token's query"),
        Method(
            "oasis-paper",
            "OasisKV as in the paper: one draft, looked at and rejected; n-gram",
            lookahead=LookaheadMode.PAPER,
            drafts=_ngram,
        ),
        Method("stale", "the last token's query, no hot set", lambda seed: Stale()),
        Method("window", "sink and a longer window", lambda seed: WindowOnly()),
        Method("random", "random blocks", RandomBlocks),
        *(
            Method(
                f"{name}-{suffix}",
                f"{name}, {doc}",
                lookahead=mode,
                drafts=drafts,
                settings=(*settings, *own),
                ablation=True,
            )
            for name, mode, drafts, settings, suffixes in (
                ("oasis-oracle", LookaheadMode.HELD_BACK, _oracle, (), ("free",)),
                ("oasis-oracle1", LookaheadMode.HELD_BACK, _oracle, _ONE_DRAFT, tuple(_LIMITS)),
                ("oasis-none", LookaheadMode.LAST_ACCEPTED, _none, (), ("free",)),
            )
            for suffix, (doc, own) in _LIMITS.items()
            if suffix in suffixes
        ),
    )
}
