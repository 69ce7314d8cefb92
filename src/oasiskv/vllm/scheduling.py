"""What the scheduler side knows of each request, for KV-cache manager and connector alike."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request, RequestStatus

from oasiskv.errors import TransferError
from oasiskv.stores.prefix import PrefixBlocks
from oasiskv.vllm.events import StoreEvents


@dataclass(eq=False)
class Held:
    """What may yet be written for a request that has ended or was preempted.

    Attributes:
        store_blocks: of the store.
        slots: blocks of vLLM's pool.
        promised: store blocks that count as taken until then.
        since: when it was first kept, on the monotonic clock.
    """

    store_blocks: list[int] = field(default_factory=list)
    slots: list[KVCacheBlock] = field(default_factory=list)
    promised: int = 0
    since: float = field(default_factory=time.monotonic)


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
        resume_start: ``window_start`` of the sparse request that was preempted, from then until the
            workers hear that it is back; 0 for any other.
        computed_blocks: blocks of it that vLLM counted as computed, found in its own cache or to be
            loaded, when it last asked what the request needs to be scheduled.
        due: slots that it gets if it is scheduled, as of then.
        store_blocks: store blocks handed out to it, in order of its blocks; kept while preempted.
        announced: the workers know of its first ``store_blocks``.
        in_step: a step of it runs, which the workers have not acknowledged.
        matched: store blocks that hold its first blocks, as of the last look.
        known: how many of ``store_blocks`` held its first blocks when it was admitted.
        loads: pairs (store block, block of vLLM's pool) to copy in its first step.
        stored: how many of ``store_blocks`` the store holds.
        published: how many of them others may find there.
        closed_dense: how many closed while it was dense, once it has gone sparse. What it adds from
            then on was computed from less than its context, and is nobody else's prefix.
        promised: store blocks it may come to need in all; counted as taken from its first admission
            to its end.
        stale: it has computed something before the store was reset, and is nobody's prefix until it
            starts anew.
    """

    request: Request
    max_model_len: int
    hot: list[KVCacheBlock] = field(default_factory=list)
    hot_sent: bool = False
    window_start: int = 0
    resume_start: int = 0
    computed_blocks: int = 0
    due: int = 0
    store_blocks: list[int] = field(default_factory=list)
    announced: bool = False
    in_step: bool = False
    matched: list[int] = field(default_factory=list)
    known: int = 0
    loads: list[tuple[int, int]] = field(default_factory=list)
    stored: int = 0
    published: int = 0
    closed_dense: int | None = None
    promised: int = 0
    stale: bool = False

    @property
    def most_tokens(self) -> int:
        """Longest that the request can become.

        The prompt and ``max_tokens`` of a session change with each of its parts. One that had to
        wait for the store in its middle could wait for another that does so too.
        """
        if self.request.resumable:
            return self.max_model_len
        asked = int(self.request.num_prompt_tokens + self.request.max_tokens)
        return min(asked, self.max_model_len)

    @property
    def resumes(self) -> bool:
        """Whether it was preempted sparse and is to be so again.

        If vLLM counts less as computed than what comes before its window, as of a request that
        reads no prefixes, it is dense again from there on.
        """
        return 0 < self.resume_start <= self.computed_blocks


class SchedulerState:
    """Requests of one engine and the room in the store.

    Attributes:
        requests: by vLLM's request id; from arrival to end.
        admitted: those of them that have blocks, from admission to end or preemption.
        may_go_sparse: admitted ones that are dense and may yet get slots.
        in_transition: those with slots whose transition the workers have not acknowledged.
        ending: requests that ended in a step which the workers have not acknowledged.
        moved: sparse ones whose window has moved since blocks were last given back.
        promised: store blocks that requests may come to need, from first admission to their end.
        dropped: ids whose state the workers must forget, ended or preempted; and whether they keep
            what is in the slots, because the request comes back sparse.
        in_flight: requests of which a worker has a write or a transfer on its way, as of the last
            acknowledgement.
        held: what such requests left when they ended or were preempted; no one else's until the
            workers have nothing of them on its way.
        returned: slots that vLLM's pool is to have back.
        lost_after_s: what has been held for longer is taken to be held for ever.
        store: hands out store blocks; None until the connector has made it.
        restores: the store holds all KV of a request, so that a preempted one comes back from it.
            Not where other layers, as of sliding windows, have KV too: there it starts again.
        shares: requests find blocks of others in the store.
        events: what is found in the store from now on, or no longer; None where nobody asks.
        decode_tokens: most tokens of a decoding request in one step, drafts included.
        batch_tokens: most tokens of all requests in one step.
        counts: what happened since it was last reported, by key of the metrics' catalogue.
    """

    def __init__(self) -> None:
        self.requests: dict[str, ScheduledRequest] = {}
        self.admitted: dict[str, ScheduledRequest] = {}
        self.may_go_sparse: dict[str, ScheduledRequest] = {}
        self.in_transition: dict[str, ScheduledRequest] = {}
        self.moved: dict[str, ScheduledRequest] = {}
        self.ending: dict[str, ScheduledRequest] = {}
        self.promised = 0
        self.dropped: dict[str, bool] = {}
        self.in_flight: set[str] = set()
        self.held: dict[str, Held] = {}
        self.returned: list[KVCacheBlock] = []
        self.lost_after_s = 0.0
        self.store: PrefixBlocks | None = None
        self.restores = True
        self.shares = False
        self.events: StoreEvents | None = None
        self.decode_tokens = 1
        self.batch_tokens = 1
        self.counts: Counter[str] = Counter()

    def admit(self, request_id: str, store_blocks: int, past_tokens: int) -> None:
        """It has got its first blocks.

        Of its store blocks it keeps those that vLLM counts as computed; the rest it computes again.

        Args:
            request_id: one that was not admitted.
            store_blocks: those it may come to need in all.
            past_tokens: it may go sparse once it is longer than that.
        """
        state = self.requests[request_id]
        self.admitted[request_id] = state
        if state.resume_start and not state.resumes:
            self._start_anew(state, state.computed_blocks)
        self._cut_store_blocks(state, state.computed_blocks)
        if not state.promised:
            state.promised = store_blocks
            self.promised += store_blocks
        if store_blocks and state.most_tokens > past_tokens:
            self.may_go_sparse[request_id] = state

    def take_slots(self, request_id: str, slots: list[KVCacheBlock]) -> None:
        """An admitted request has got slots.

        It goes sparse with its next step that samples a token, or is sparse from its next step on
        if it was when it was preempted.
        """
        state = self.requests[request_id]
        state.hot = slots
        self.may_go_sparse.pop(request_id, None)
        if state.resume_start:
            state.window_start = state.resume_start
        else:
            self.in_transition[request_id] = state

    def acknowledge(self, request_id: str, stored: int, window_start: int | None) -> None:
        """All workers have done a step of the request.

        Blocks that closed while it was dense may be found by others from now on.

        Args:
            request_id: one that may have ended in the meantime.
            stored: its blocks in the store.
            window_start: first block of its window; None while dense.
        """
        ending = self.ending.pop(request_id, None)
        state = ending or self.requests.get(request_id)
        if state is None or self.store is None:
            return
        state.in_step = False
        state.stored = stored
        if window_start is not None and state.closed_dense is None:
            state.closed_dense = stored
            self.counts["transitions"] += 1
        # What a failed request has stored may be wrong.
        failed = state.request.status is RequestStatus.FINISHED_ERROR
        unfit = failed or state.stale
        hashes = state.request.block_hashes if self.shares and not unfit else []
        most = stored if state.closed_dense is None else min(stored, state.closed_dense)
        for index in range(state.published, min(most, len(hashes))):
            new = self.store.publish(state.store_blocks[index], hashes[index])
            if new and self.events is not None:
                self.events.published(state.request, index)
            state.published = index + 1
        if ending is not None:
            self.returned.extend(self._end(ending))
            return
        if window_start is None or not state.hot_sent:
            return
        self.in_transition.pop(request_id, None)
        if window_start != state.window_start:
            state.window_start = window_start
            self.moved[request_id] = state

    def take_in_flight(self, names: set[str]) -> None:
        """What the workers have on its way; what else is held goes back."""
        self.in_flight = names
        for name in self.held.keys() - names:
            self.returned.extend(self._free(self.held.pop(name)))

    def unpublish(self, blocks: set[int]) -> None:
        """These store blocks are damaged: nobody finds them any more."""
        for block in blocks:
            if self.store is not None:
                self.store.unpublish(block)

    def reset(self) -> None:
        """Nothing that was computed until now is found, or comes back from the store, any more.

        Requests that were preempted start anew. Those that run go on with what they have: it is
        theirs alone, and is not kept for them if they are preempted. vLLM has no step under way
        when it asks for this.
        """
        for name, state in self.requests.items():
            if name in self.admitted:
                state.stale = True
            else:
                self._start_anew(state)
        for state in self.ending.values():
            state.stale = True
        if self.store is not None:
            self.store.unpublish_all()

    def check_held(self) -> None:
        """Nothing runs and there is no room: what is held must come back.

        Raises:
            TransferError: some of it never will.
        """
        now = time.monotonic()
        lost = [n for n, held in self.held.items() if now - held.since > self.lost_after_s]
        if lost:
            blocks = sum(len(self.held[name].store_blocks) for name in lost)
            slots = sum(len(self.held[name].slots) for name in lost)
            raise TransferError(
                f"no request can be let in: {blocks} store blocks and {slots} slots of requests "
                f"that are gone ({', '.join(lost)}) may yet be written, and were not within "
                f"transfer_timeout_s={self.lost_after_s}; the store is stalled or has lost them: "
                "start the engine again"
            )

    def forget(self, request_id: str) -> list[KVCacheBlock]:
        """It has ended or was preempted: the workers drop it. Its store blocks go when it ends.

        Returns:
            Slots that may go at once.
        """
        state = self.requests[request_id]
        for group in (self.admitted, self.may_go_sparse, self.in_transition, self.moved):
            group.pop(request_id, None)
        ended = state.request.is_finished()
        if not self.restores:
            state.window_start = state.stored = 0
            state.closed_dense = None
        state.resume_start = state.resume_start or state.window_start
        if state.promised:
            self.dropped[request_id] = not ended and state.resume_start > 0
        state.announced = state.hot_sent = False
        state.window_start = 0
        state.loads = []
        if not ended:
            if state.stale:
                self._start_anew(state)
            slots, state.hot = state.hot, []
            return self._cut_store_blocks(state, state.stored, slots)
        del self.requests[request_id]
        if not state.in_step:
            return self._end(state)
        # What its last step has stored is of use to others, and may have started transfers.
        self.ending[request_id] = state
        return []

    def _start_anew(self, state: ScheduledRequest, keep: int = 0) -> None:
        """A request that has no blocks of vLLM's comes back dense, with its first store blocks."""
        state.stale = False
        state.resume_start = 0
        state.matched = []
        if state.closed_dense is not None and keep <= state.closed_dense:
            state.closed_dense = None
        if state.promised:
            self.dropped[state.request.request_id] = False
        self._cut_store_blocks(state, keep)

    def forget_ending(self) -> None:
        """The workers did not acknowledge the last step of these: they end without."""
        for state in self.ending.values():
            self.returned.extend(self._end(state))
        self.ending.clear()

    def _cut_store_blocks(
        self, state: ScheduledRequest, keep: int, slots: Sequence[KVCacheBlock] = ()
    ) -> list[KVCacheBlock]:
        """Give back all but its first store blocks, and slots; returns those that may go at once.

        What is computed again from there on is as dense as the request is then.
        """
        left = Held(state.store_blocks[keep:], list(slots))
        del state.store_blocks[keep:]
        state.stored, state.published = min(state.stored, keep), min(state.published, keep)
        return self._let_go(state.request.request_id, left)

    def _end(self, state: ScheduledRequest) -> list[KVCacheBlock]:
        left = Held(state.store_blocks, state.hot, state.promised)
        return self._let_go(state.request.request_id, left)

    def _let_go(self, request_id: str, left: Held) -> list[KVCacheBlock]:
        """Give back what a request leaves, or hold it; returns slots that may go at once."""
        if request_id not in self.in_flight:
            return self._free(left)
        held = self.held.setdefault(request_id, Held())
        held.store_blocks += left.store_blocks
        held.slots += left.slots
        held.promised += left.promised
        return []

    def _free(self, left: Held) -> list[KVCacheBlock]:
        self.promised -= left.promised
        if self.store is not None:
            self.store.free(left.store_blocks)
        return left.slots


_states: WeakKeyDictionary[BlockPool, SchedulerState] = WeakKeyDictionary()


def state_of(block_pool: BlockPool) -> SchedulerState:
    """The state that belongs to an engine, known by its block pool."""
    return _states.setdefault(block_pool, SchedulerState())
