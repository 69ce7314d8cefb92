"""One request of the reference engine."""

from dataclasses import dataclass, field
from enum import Enum

import torch

from oasiskv.core.request import TieredRequest
from oasiskv.drafts.verify import Sampling
from oasiskv.errors import OasisError
from oasiskv.hf.memory import RequestKV


class Phase(Enum):
    """Where a request stands."""

    PREFILL = "prefill"
    DENSE = "dense"
    SPARSE = "sparse"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"

    @property
    def running(self) -> bool:
        """The engine still computes for it."""
        return self in (Phase.PREFILL, Phase.DENSE, Phase.SPARSE)


@dataclass(eq=False, kw_only=True)
class Request(TieredRequest):
    """State of one request; ``computed`` counts all tokens but the last one once decoding.

    Attributes:
        prompt: token ids.
        forced: token ids that are decoded instead of sampled ones, for teacher forcing.
        max_new_tokens: most tokens to decode, the forced ones included.
        sampling: how tokens are chosen.
        generator: its source of randomness; None when greedy.
        kv: fast-tier memory, empty once the request has ended.
        phase: where it stands.
        output: decoded tokens.
        error: why it failed.
    """

    kv: RequestKV
    prompt: list[int]
    forced: list[int]
    max_new_tokens: int
    sampling: Sampling
    generator: torch.Generator | None
    phase: Phase = Phase.PREFILL
    output: list[int] = field(default_factory=list)
    error: OasisError | None = None

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""
        return self.prompt + self.output
