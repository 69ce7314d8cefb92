"""What a simulated engine is configured with, and what its worker keeps of blocks and requests."""

from contextlib import contextmanager
from dataclasses import dataclass, field

from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

import oasiskv.vllm

SIZE = 16
BLOCK_BYTES = SIZE * 32 * 2 * 4
VOCABULARY = 90


def next_token(tokens):
    """What the model says after ``tokens``."""
    return hash(tuple(tokens[-3:])) % VOCABULARY


@dataclass(frozen=True)
class Content:
    """Of one token's place in a block.

    Attributes:
        prefix: stands for the token, all before it and the weights.
        exact: it was computed from all before it.
    """

    prefix: int
    exact: bool


@dataclass(eq=False)
class SimulatedRequest:
    """One request in the worker.

    Attributes:
        store_blocks: those that its closed blocks are in.
        assigned: further ones, for blocks that close later.
        late: closed blocks, by index, whose write has not arrived.
        window_start: first block of its window; None while dense.
        slots: it has them.
    """

    store_blocks: list[int] = field(default_factory=list)
    assigned: list[int] = field(default_factory=list)
    late: dict[int, list[Content]] = field(default_factory=dict)
    window_start: int | None = None
    slots: bool = False

    @property
    def stored(self):
        return min(self.late, default=len(self.store_blocks))


@contextmanager
def simulated_config(folder, store_blocks, mode="always", drafts=None, **engine_args):
    """vLLM's configuration, as current one: threshold 100 tokens, S 3 blocks, window 1 block."""
    arguments = oasiskv.vllm.engine_args(
        mode=mode,
        threshold_tokens=100,
        budget_tokens=48,
        hot_tokens=48,
        sink_tokens=16,
        window_tokens=16,
        host_gib=(store_blocks + 0.5) * BLOCK_BYTES / 2**30,
    )
    defaults = {
        "dtype": "float32",
        "max_model_len": 320,
        "max_num_seqs": 6,
        "max_num_batched_tokens": 64,
        "enforce_eager": True,
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "speculative_config": drafts,
    }
    config = EngineArgs(str(folder), **(defaults | arguments | engine_args)).create_engine_config()
    with set_current_vllm_config(config):
        yield config
