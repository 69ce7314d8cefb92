"""Which drafts are verified, and which query of a step is the lookahead query.

A step feeds ``[last accepted token, d1 .. dk]``; row i, 0 to k, is the query and the logits of the
i-th of them.
"""

from collections.abc import Sequence
from enum import StrEnum

from oasiskv.errors import StateError


class LookaheadMode(StrEnum):
    """How the drafts of a step serve as lookahead.

    ``held_back``: the last draft is fed but never accepted. If the sampler chooses the same token,
    the draft's query is exactly the next step's first query.
    ``last_accepted``: every draft may be accepted; the query is that of the last accepted token.
    ``paper``: one draft, always rejected; its query is the lookahead query, right or wrong.
    """

    HELD_BACK = "held_back"
    LAST_ACCEPTED = "last_accepted"
    PAPER = "paper"


def split_drafts(drafts: Sequence[int], mode: LookaheadMode) -> tuple[list[int], list[int]]:
    """Split proposed drafts into those to verify and those only to look at.

    Args:
        drafts: the drafts of one request, in order.
        mode: the lookahead mode.

    Returns:
        (verified, held): what to feed is verified + held; under ``paper`` drafts after the first
        are in neither.
    """
    if mode is LookaheadMode.HELD_BACK:
        return list(drafts[:-1]), list(drafts[-1:])
    if mode is LookaheadMode.LAST_ACCEPTED:
        return list(drafts), []
    return [], list(drafts[:1])


def lookahead_row(mode: LookaheadMode, drafts: Sequence[int], accepted: Sequence[int]) -> int:
    """Return the row of this step whose query is the lookahead query.

    Args:
        mode: the lookahead mode.
        drafts: every draft that was fed, verified and held.
        accepted: what `verify` returned: accepted drafts, then the token it sampled.

    Returns:
        A row from 0 (the last token accepted before this step) to ``len(drafts)``.

    Raises:
        StateError: ``accepted`` is empty, or longer than the mode can accept.
    """
    verified, _ = split_drafts(drafts, mode)
    if not 1 <= len(accepted) <= len(verified) + 1:
        raise StateError(
            f"{len(accepted)} accepted tokens for {len(drafts)} drafts in lookahead mode "
            f"{mode.value}: needed are 1 to {len(verified) + 1}"
        )
    if mode is LookaheadMode.PAPER:
        return min(1, len(drafts))
    last = len(accepted) - 1
    # The token just sampled has a query already if it was also fed as the draft of its position.
    # After a rejection it cannot have: the rejected draft is what the sampler did not choose.
    if mode is LookaheadMode.HELD_BACK and last < len(drafts) and drafts[last] == accepted[-1]:
        return last + 1
    return last
