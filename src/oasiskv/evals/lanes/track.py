"""One question as one lane decodes it: what is fed next, and what is kept of it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from oasiskv.drafts.base import DraftSource
from oasiskv.drafts.lookahead import LookaheadMode, split_drafts
from oasiskv.drafts.verify import accept_known
from oasiskv.evals.lanes.rows import Segment


@dataclass
class Track:
    """Tokens of one question in one lane.

    Args:
        name: of the question, as the draft source knows it.
        prompt: token ids.
        forced: token ids decoded whatever the model says, first.
        limit: most tokens to decode, the forced ones included.
        stops: token ids that end it, but for forced ones.
        mode: how drafts serve as lookahead.
        most_drafts: most drafts of a step.
        drafts: those of the step at hand.
        ended: nothing more is decoded.

    Attributes:
        tokens: prompt and what is decoded.
    """

    name: str
    prompt: list[int]
    forced: list[int]
    limit: int
    stops: frozenset[int]
    mode: LookaheadMode
    most_drafts: int
    drafts: list[int] = field(default_factory=list)
    ended: bool = False
    tokens: list[int] = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def decoded(self) -> int:
        """Tokens decoded so far."""
        return len(self.tokens) - len(self.prompt)

    @property
    def computed(self) -> int:
        """Tokens whose KV stays: all but the last one."""
        return len(self.tokens) - 1

    def propose(self, source: DraftSource) -> Segment:
        """What the next step computes."""
        if self.ended:
            return Segment((), self.computed)
        room = min(self.most_drafts, self.limit - self.decoded)
        self.drafts = source.propose(self.name, self.tokens, room)
        return Segment([self.tokens[-1], *self.drafts], self.computed)

    def accept(self, best: Sequence[int]) -> list[int]:
        """Take over a step.

        Args:
            best: the most likely next token of each row that was computed.

        Returns:
            The tokens that the step gains.
        """
        verified, _ = split_drafts(self.drafts, self.mode)
        known = self.forced[self.decoded :] or best
        before = len(self.tokens)
        for token in accept_known(verified, known):
            self.tokens.append(token)
            chosen = self.decoded > len(self.forced)
            if self.decoded == self.limit or (token in self.stops and chosen):
                self.ended = True
                break
        return self.tokens[before:]
