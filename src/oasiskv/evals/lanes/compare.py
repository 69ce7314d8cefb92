"""Logits of decoded tokens beside those of dense."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oasiskv.evals.lanes.asked import Asked, Decoded


@dataclass(frozen=True)
class Gained:
    """One token that a step gave.

    Args:
        question: its number.
        lane: its lane.
        row: the row whose logits predict it.
        index: its number among the tokens decoded.
        token: its id.
    """

    question: int
    lane: int
    row: int
    index: int
    token: int


class Comparison:
    """Takes the logits of each round.

    Args:
        asked: the questions.
        lanes: how many lanes there are.
        keep: keep the log-probabilities themselves.
    """

    def __init__(self, asked: Sequence[Asked], lanes: int, keep: bool) -> None:
        self.found = [[Decoded() for _ in range(lanes)] for _ in asked]
        self._kept: list[list[list[Tensor]]] = [[[] for _ in range(lanes)] for _ in asked]
        self._keep = keep
        given = [each.log_probs for each in asked if each.log_probs is not None]
        self._reference = torch.nn.utils.rnn.pad_sequence(given, True) if given else None

    def take(self, logits: Tensor, gained: Sequence[Gained]) -> None:
        """Compare.

        Args:
            logits: float ``[Q, N, vocabulary]``.
            gained: tokens of the round.
        """
        if not gained or not (self._keep or self._reference is not None):
            return
        table = torch.tensor(
            [(each.question, each.row, each.index, each.token) for each in gained],
            device=logits.device,
        )
        question, row, index, token = table.unbind(1)
        ours = logits[question, row].log_softmax(-1)
        if self._keep:
            for each, kept in zip(gained, ours, strict=True):
                self._kept[each.question][each.lane].append(kept)
        nll = -ours.gather(-1, token[:, None])[:, 0]
        for each, one in zip(gained, nll.tolist(), strict=True):
            self.found[each.question][each.lane].nll.append(one)
        if self._reference is None:
            return
        theirs = self._reference[question, index]
        kl = (theirs.exp() * (theirs - ours)).sum(-1)
        same = ours.argmax(-1) == theirs.argmax(-1)
        for each, one, is_same in zip(gained, kl.tolist(), same.tolist(), strict=True):
            found = self.found[each.question][each.lane]
            found.kl.append(one)
            found.same.append(is_same)

    def end(self) -> None:
        """Put what was kept together."""
        if self._keep:
            for found, kept in zip(self.found, self._kept, strict=True):
                for one, rows in zip(found, kept, strict=True):
                    one.log_probs = torch.stack(rows)
