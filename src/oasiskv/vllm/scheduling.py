"""What the scheduler side knows of each request, for KV-cache manager and connector alike."""

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from oasiskv.stores.allocator import BlockAllocator


@dataclass(eq=False)
class ScheduledRequest:
    """One request on the scheduler side.

    Attributes:
        request: vLLM's own state.
        max_model_len: longest sequence that the engine allows; vLLM does not hold ``max_tokens``
            to it, but ends there.
        hot: its slots, private blocks of vLLM's pool; empty until they are needed.
        hot_sent: the workers know of ``hot``.
        window_start: first block of the window that all workers have acknowledged; blocks between
            sink and window may be given back. 0 while dense.
        store_blocks: store blocks handed out to it, in order of its blocks.
        promised: store blocks it may come to need in all; counted as taken from its admission on.
    """

    request: Request
    max_model_len: int
    hot: list[KVCacheBlock] = field(default_factory=list)
    hot_sent: bool = False
    window_start: int = 0
    store_blocks: list[int] = field(default_factory=list)
    promised: int = 0

    @property
    def most_tokens(self) -> int:
        """Longest that the request can become."""
        asked = int(self.request.num_prompt_tokens + self.request.max_tokens)
        return min(asked, self.max_model_len)


class SchedulerState:
    """Requests of one engine and the room in the store.

    Attributes:
        requests: by vLLM's request id; from arrival to end.
        dropped: ids whose state the workers must forget: ended or preempted.
        store: hands out store blocks; None until the connector has made it.
    """

    def __init__(self) -> None:
        self.requests: dict[str, ScheduledRequest] = {}
        self.dropped: list[str] = []
        self.store: BlockAllocator | None = None

    @property
    def promised(self) -> int:
        """Store blocks that running requests may come to need."""
        return sum(request.promised for request in self.requests.values())

    def forget(self, request_id: str) -> None:
        """It has ended or was preempted: the workers drop it, its store blocks are free."""
        state = self.requests[request_id]
        if state.store_blocks and self.store is not None:
            self.store.free(state.store_blocks)
        if state.promised:
            self.dropped.append(request_id)
        if state.request.is_finished():
            del self.requests[request_id]
        state.store_blocks = []
        state.promised = 0
        state.window_start = 0
        state.hot_sent = False


_states: WeakKeyDictionary[BlockPool, SchedulerState] = WeakKeyDictionary()


def state_of(block_pool: BlockPool) -> SchedulerState:
    """The state that belongs to an engine, known by its block pool."""
    return _states.setdefault(block_pool, SchedulerState())
