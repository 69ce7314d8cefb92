"""What lanes are asked, and what they give."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from oasiskv.hf.prefill import Prefilled


@dataclass(frozen=True)
class Asked:
    """One question.

    Args:
        name: unique in a batch.
        prefilled: its prompt but the last tokens.
        prompt: token ids.
        forced: decoded whatever the model says.
        new_tokens: most further ones.
        expected: what is expected to follow ``forced``; the oracle's drafts.
        stops: token ids that end it, but for forced ones.
        log_probs: float ``[forced + new tokens, vocabulary]``, what logits are compared with; None:
            nothing.
    """

    name: str
    prefilled: Prefilled
    prompt: list[int]
    forced: list[int]
    new_tokens: int
    expected: Sequence[int] = ()
    stops: frozenset[int] = frozenset()
    log_probs: Tensor | None = None

    @property
    def limit(self) -> int:
        """Most tokens to decode."""
        return len(self.forced) + self.new_tokens


@dataclass
class Decoded:
    """What one setting gave on one question.

    Args:
        tokens: decoded after the forced ones.
        nll: of each token decoded, nats; empty where nothing is compared or kept.
        kl: of each token's distribution from ``Asked.log_probs``, nats; empty without them.
        same: whether the most likely token is the same as by ``Asked.log_probs``; likewise.
        log_probs: float ``[tokens decoded, vocabulary]``; None where they were not asked for.
        moved_bytes: mean bytes store -> fast tier of a step; what a policy would have to move.
        mass: ``[layers, KV heads]`` share of true attention that was attended to; None if none was
            measured.
        recall: the same of the best blocks.
        agreement: share of the predicted blocks that the step's own query would have chosen; None
            where nothing was predicted and compared.
        misses: wanted blocks that were in no slot, as a share of those wanted; None likewise.
    """

    tokens: list[int] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    same: list[bool] = field(default_factory=list)
    log_probs: Tensor | None = None
    moved_bytes: float = 0.0
    mass: Tensor | None = None
    recall: Tensor | None = None
    agreement: float | None = None
    misses: float | None = None
