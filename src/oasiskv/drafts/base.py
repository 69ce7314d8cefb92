"""Where lookahead tokens come from: the interface, and the source that has none."""

from collections.abc import Sequence
from typing import Protocol


class DraftSource(Protocol):
    """Guesses the next tokens; the target model checks them, so a wrong guess costs only time."""

    def propose(self, request_id: str, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Guess what follows ``tokens``.

        Args:
            request_id: the request, the same from its first call until `finish`.
            tokens: prompt and accepted output. Between two calls for one request it only grows.
            max_drafts: the most drafts that the caller can feed; below 1 asks for none.

        Returns:
            0 to ``max_drafts`` token ids. The same calls give the same drafts, and too few
            tokens give fewer drafts, never an error.
        """
        ...

    def finish(self, request_id: str) -> None:
        """Forget the request's state, if there is any; the id may come again."""
        ...


class NoDrafts:
    """Proposes nothing: every step is plain decoding and the lookahead query is one step stale."""

    def propose(self, request_id: str, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Return no drafts."""
        return []

    def finish(self, request_id: str) -> None:
        """Do nothing; there is no state."""
