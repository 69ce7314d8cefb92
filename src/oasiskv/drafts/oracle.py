"""Drafts from an answer that is known beforehand, for measurement."""

from collections.abc import Mapping, Sequence

from oasiskv.errors import ConfigError, StateError


class OracleDrafts:
    """Proposes a known continuation: no method, but an upper bound on what right drafts give.

    It goes by position only: where the output has left the known continuation its drafts are
    mostly wrong, and past the end there are none.

    Args:
        continuations: request id -> the tokens that follow its prompt, from an earlier run.
        prompt_tokens: request id -> tokens of its prompt.

    Raises:
        ConfigError: the two name different requests.
    """

    def __init__(
        self, continuations: Mapping[str, Sequence[int]], prompt_tokens: Mapping[str, int]
    ) -> None:
        if unmatched := continuations.keys() ^ prompt_tokens.keys():
            raise ConfigError(
                f"continuations and prompt_tokens must name the same requests; "
                f"in one of them only: {', '.join(sorted(unmatched))}"
            )
        self._continuations = continuations
        self._prompt_tokens = prompt_tokens

    def propose(self, request_id: str, tokens: Sequence[int], max_drafts: int) -> list[int]:
        """Propose the known tokens at the next positions; see `DraftSource.propose`.

        Raises:
            StateError: nothing is known of the request, so nothing would be measured.
        """
        if request_id not in self._continuations:
            raise StateError(
                f"the oracle knows no continuation of request {request_id!r}: "
                "pass one in continuations"
            )
        at = len(tokens) - self._prompt_tokens[request_id]
        if at < 0 or max_drafts < 1:
            return []
        return list(self._continuations[request_id][at : at + max_drafts])

    def finish(self, request_id: str) -> None:
        """Do nothing; the known continuations belong to the caller."""
