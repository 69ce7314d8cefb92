"""Drafts that several lanes ask for are made once."""

from collections.abc import Sequence

from oasiskv.drafts.base import DraftSource


class SharedDrafts:
    """Remembers what a source proposed after which tokens.

    Lanes that decode the same question stand at different places, and come by the same ones.

    Args:
        source: the same tokens must always give the same drafts, and fewer of them where fewer are
            asked for; it must bear that tokens are taken back.
        prompt_tokens: question -> tokens of its prompt.
        most: most drafts that anybody asks for.
    """

    def __init__(self, source: DraftSource, prompt_tokens: dict[str, int], most: int) -> None:
        self._source, self._prompt_tokens, self._most = source, prompt_tokens, most
        self._known: dict[tuple[str, tuple[int, ...]], list[int]] = {}

    def propose(self, request_id: str, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """See ``DraftSource.propose``."""
        place = request_id, tuple(tokens[self._prompt_tokens[request_id] :])
        if place not in self._known:
            self._known[place] = self._source.propose(request_id, tokens, self._most)
        return self._known[place][: max(0, max_drafts)]

    def finish(self, request_id: str) -> None:
        """Other lanes may still ask."""
