"""Drafts copied from the request's own tokens (prompt lookup)."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from oasiskv.errors import ConfigError


@dataclass
class _Index:
    """Where each n-gram of a request was last continued.

    Args:
        indexed: tokens whose n-grams are in ``continuation``.
        continuation: n-gram -> position of the token after its most recent occurrence.
    """

    indexed: int = 0
    continuation: dict[tuple[int, ...], int] = field(default_factory=dict)


class NgramDrafts:
    """Finds the latest tokens earlier in the text and proposes what followed them there.

    The longest suffix that occurred before decides, and of its occurrences the most recent. An
    occurrence may overlap the suffix but is never the suffix itself. Where the copy reaches the
    end of the known tokens it goes on with its own output, so that a match always gives
    ``max_drafts`` drafts: after ``a b a b`` come ``a b a b ...``, the text's own period.

    Source: prompt lookup decoding, https://github.com/apoorvumang/prompt-lookup-decoding.

    Args:
        max_ngram: tokens of the longest suffix looked for.
        min_ngram: tokens of the shortest, 1 to ``max_ngram``.

    Raises:
        ConfigError: ``min_ngram`` is below 1 or above ``max_ngram``.
    """

    def __init__(self, max_ngram: int = 3, min_ngram: int = 1) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise ConfigError(
                f"min_ngram = {min_ngram} and max_ngram = {max_ngram}: "
                "needed is 1 <= min_ngram <= max_ngram"
            )
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._indices: dict[str, _Index] = {}

    def propose(self, request_id: str, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Propose ``max_drafts`` tokens, or none without a match; see `DraftSource.propose`."""
        if max_drafts < 1 or not tokens:
            return []
        index = self._indices.setdefault(request_id, _Index())
        self._extend(index, tokens)
        for size in self._sizes:
            if size < len(tokens):
                start = index.continuation.get(tuple(tokens[len(tokens) - size :]))
                if start is not None:
                    return _copy_from(tokens, start, max_drafts)
        return []

    def finish(self, request_id: str) -> None:
        """Forget the request's index."""
        self._indices.pop(request_id, None)

    def _extend(self, index: _Index, tokens: Sequence[int]) -> None:
        """Index the n-grams that a token follows: all but those that end at the last token."""
        for end in range(index.indexed + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    index.continuation[tuple(tokens[end - size : end])] = end
        index.indexed = max(index.indexed, len(tokens) - 1)


def _copy_from(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return ``count`` tokens from ``start`` on; past the end the copy reads its own output."""
    copied = list(tokens[start : start + count])
    period = len(tokens) - start
    for position in range(len(copied), count):
        copied.append(copied[position - period])
    return copied
