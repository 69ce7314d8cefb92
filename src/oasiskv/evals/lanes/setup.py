"""From settings to lanes: their order, what they share, their draft sources and tracks."""

from collections.abc import Sequence
from itertools import groupby
from typing import TypeVar

import torch

from oasiskv.drafts.base import DraftSource
from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.drafts.ngram import NgramDrafts
from oasiskv.drafts.oracle import OracleDrafts
from oasiskv.errors import PromptError
from oasiskv.evals.lanes.asked import Asked
from oasiskv.evals.lanes.attention import Lanes
from oasiskv.evals.lanes.track import Track
from oasiskv.evals.methods import METHODS, Known, Setting

T = TypeVar("T")

KNOWN_ROWS = 16
"""Known tokens that a policy decodes in one round."""


def in_order(settings: Sequence[Setting]) -> list[Setting]:
    """Policies first, each policy's lanes side by side; then OasisKV's, like hot sets together.

    Policies go by kind of heads, see ``policies.choose``.
    """
    names = list(METHODS)

    def place(setting: Setting) -> tuple[float, ...]:
        policy = setting.method.policy
        if policy is None:
            return 2, *_kind(setting)
        return int(not policy(0).by_query_head), names.index(setting.method.name)

    return sorted(settings, key=place)


def lanes_of(settings: Sequence[Setting], seed: int, device: torch.device) -> Lanes:
    """Who decodes in which lane; settings in order."""
    names = [each.method.name for each in settings if each.method.policy is not None]
    policies = []
    for name, lanes in _runs(names):
        policy = METHODS[name].policy
        assert policy is not None
        policies.append((lanes, policy(seed)))
    counts = torch.tensor([each.config.hot_blocks for each in settings], device=device)
    return Lanes(policies, range(len(names), len(settings)), counts)


def hot_lanes(settings: Sequence[Setting]) -> list[range]:
    """OasisKV's lanes, those whose hot sets are alike together; settings in order."""
    kinds = [None if each.method.policy else _kind(each) for each in settings]
    return [lanes for kind, lanes in _runs(kinds) if kind is not None]


def _kind(setting: Setting) -> tuple[float, ...]:
    """What hot sets go by."""
    config = setting.config
    return config.budget_blocks, config.hot_blocks, config.cap_blocks, config.hysteresis


def _runs(values: Sequence[T]) -> list[tuple[T, range]]:
    """Each value with the places where it stands side by side."""
    found = []
    start = 0
    for value, run in groupby(values):
        end = start + len(list(run))
        found.append((value, range(start, end)))
        start = end
    return found


def drafts_of(
    setting: Setting, asked: Sequence[Asked], assistant: DraftSource | None, dense_only: bool
) -> DraftSource:
    """A setting's draft source for all questions.

    Args:
        setting: the setting.
        asked: all questions.
        assistant: drafts of another model.
        dense_only: no other method decodes.
    """
    prompts = {each.name: len(each.prompt) for each in asked}
    if setting.method.policy is None:
        follows = {each.name: [*each.forced, *each.expected] for each in asked}
        return setting.method.drafts(Known(follows, prompts, assistant))
    if dense_only:
        # Nothing is counted of its rows, so that drafts of which most are wrong do no harm.
        return ForcedThenNgram(asked)
    # What a policy decodes is known while it is forced: several tokens a round, the last of which
    # waits for the next round, so that no row is computed twice.
    return OracleDrafts({each.name: each.forced[:-1] for each in asked}, prompts)


class ForcedThenNgram:
    """Proposes what is forced, and n-gram drafts after it.

    Args:
        asked: all questions.
    """

    def __init__(self, asked: Sequence[Asked]) -> None:
        self._asked = {each.name: each for each in asked}
        self._ngram = NgramDrafts()

    def propose(self, request_id: str, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """See ``DraftSource.propose``."""
        one = self._asked[request_id]
        left = one.forced[len(tokens) - len(one.prompt) :]
        if left:
            return left[: max(0, min(max_drafts, len(left) - 1))]
        return self._ngram.propose(request_id, tokens, max_drafts)

    def finish(self, request_id: str) -> None:
        """See ``DraftSource.finish``."""
        self._ngram.finish(request_id)


def track_of(asked: Asked, setting: Setting) -> Track:
    """The start of one question in one lane."""
    mode, most = LookaheadMode.LAST_ACCEPTED, KNOWN_ROWS - 1
    if setting.method.policy is None:
        mode = setting.method.lookahead
        most = 1 if mode is LookaheadMode.PAPER else setting.config.draft_tokens
    return Track(asked.name, asked.prompt, asked.forced, asked.limit, asked.stops, mode, most)


def check_prompts(asked: Sequence[Asked], settings: Sequence[Setting]) -> None:
    """Refuse prompts that are no longer than what a lane attends to anyway.

    Raises:
        PromptError: names the question.
    """
    least = max(each.config.resolved_threshold_tokens for each in settings)
    for each in asked:
        if len(each.prompt) <= least:
            raise PromptError(
                f"the prompt of {each.name} has {len(each.prompt)} tokens, but at the largest "
                f"budget {least} tokens are attended to anyway: ask for longer prompts or for "
                "smaller budgets"
            )
