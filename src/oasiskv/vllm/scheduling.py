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
        admitted: those of them that have blocks, from admission to end or preemption.
        may_go_sparse: admitted ones that are dense and may yet get slots.
        in_transition: those with slots whose transition the workers have not acknowledged.
        moved: sparse ones whose window has moved since blocks were last given back.
        promised: store blocks that admitted requests may come to need.
        dropped: ids whose state the workers must forget: ended or preempted.
        store: hands out store blocks; None until the connector has made it.
        decode_tokens: most tokens of a decoding request in one step, drafts included.
        batch_tokens: most tokens of all requests in one step.
    """

    def __init__(self) -> None:
        self.requests: dict[str, ScheduledRequest] = {}
        self.admitted: dict[str, ScheduledRequest] = {}
        self.may_go_sparse: dict[str, ScheduledRequest] = {}
        self.in_transition: dict[str, ScheduledRequest] = {}
        self.moved: dict[str, ScheduledRequest] = {}
        self.promised = 0
        self.dropped: list[str] = []
        self.store: BlockAllocator | None = None
        self.decode_tokens = 1
        self.batch_tokens = 1

    def admit(self, request_id: str, store_blocks: int, past_tokens: int) -> None:
        """It has got its first blocks.

        Args:
            request_id: one that was not admitted.
            store_blocks: those it may come to need in all.
            past_tokens: it may go sparse once it is longer than that.
        """
        state = self.requests[request_id]
        self.admitted[request_id] = state
        state.promised = store_blocks
        self.promised += store_blocks
        if store_blocks and state.most_tokens > past_tokens:
            self.may_go_sparse[request_id] = state

    def take_slots(self, request_id: str, slots: list[KVCacheBlock]) -> None:
        """An admitted request goes sparse with its next step that samples a token."""
        state = self.requests[request_id]
        state.hot = slots
        self.may_go_sparse.pop(request_id, None)
        self.in_transition[request_id] = state

    def acknowledge(self, request_id: str, window_start: int) -> None:
        """All workers hold the request sparse, its window starting there."""
        state = self.requests.get(request_id)
        # A request that was preempted in the meantime starts anew.
        if state is None or not state.hot_sent:
            return
        self.in_transition.pop(request_id, None)
        if window_start != state.window_start:
            state.window_start = window_start
            self.moved[request_id] = state

    def forget(self, request_id: str) -> None:
        """It has ended or was preempted: the workers drop it, its store blocks are free."""
        state = self.requests[request_id]
        for group in (self.admitted, self.may_go_sparse, self.in_transition, self.moved):
            group.pop(request_id, None)
        self.promised -= state.promised
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
