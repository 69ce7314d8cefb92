"""The KV-cache manager: prefill in full, decode bounded to sink, hot set and window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from oasiskv.vllm.pressure import Pressure
from oasiskv.vllm.scheduling import ScheduledRequest, state_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from oasiskv.vllm.spec import OasisSpec


class OasisManager(FullAttentionManager):
    """vLLM's manager of full attention, which gives back what left the fast tier.

    Slots are private, unhashed blocks outside the request's block table. A standing reserve of S
    blocks is kept free while a dense request may still pass the threshold, so that a full pool
    does not block the transition that would relieve it. In mode ``under_pressure`` ``Pressure``
    says who takes slots, and what else is kept free.

    A request that was preempted sparse, and of which vLLM counts as computed all before its window,
    is admitted with what a sparse one has: sink, slots and window. Between sink and window its
    table has vLLM's null block from the start.
    """

    def __init__(self, kv_cache_spec: OasisSpec, **settings: Any) -> None:  # noqa: ANN401
        super().__init__(kv_cache_spec, **settings)
        self._spec = kv_cache_spec
        self._state = state_of(self.block_pool)
        self._pressure: Pressure | None = None
        self._past_tokens = self._spec.threshold_tokens
        if self._spec.mode == "under_pressure":
            self._pressure = Pressure(self._spec, self.block_pool, self._state, self.req_to_blocks)
            self._past_tokens = self._pressure.past_tokens

    def new_step_starts(self) -> None:
        """Give back the blocks between sink and window that all workers acknowledged.

        Of all requests, before any is scheduled: a request must not be preempted for want of blocks
        that another, scheduled after it, no longer needs.
        """
        super().new_step_starts()
        for name, state in self._state.moved.items():
            self._remove_blocks_in_range(name, self._spec.sink_blocks, state.window_start)
        self._state.moved.clear()
        if self._pressure is not None:
            self._pressure.start_step()

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        *args: Any,  # noqa: ANN401 - differs between vLLM's versions
        **settings: Any,  # noqa: ANN401
    ) -> int:
        """Blocks that must be free for the request to be scheduled.

        vLLM allocates right after, by the same numbers, if they are.

        Raises:
            TransferError: no request runs, and what this one waits for was lost on its way.
        """
        hits = new_computed_blocks
        needed: int = super().get_num_blocks_to_allocate(
            request_id, num_tokens, hits, total_computed_tokens, *args, **settings
        )
        state = self._state.requests.get(request_id)
        if state is None:
            return needed
        state.computed_blocks = total_computed_tokens // int(self.block_size)
        if state.resumes:
            # What lies between sink and window is not needed, found in HBM or not.
            sink, start = self._spec.sink_blocks, state.resume_start
            needed -= self._get_num_evictable_blocks(hits[sink:start])
            needed -= max(0, start - max(sink, len(hits)))
        state.due = self._spec.hot_blocks if self._takes_slots(state, num_tokens, needed) else 0
        needed += state.due + self._kept_free(state, num_tokens, needed)
        waits = request_id not in self._state.admitted
        if waits and needed > self.block_pool.get_num_free_blocks():
            self._state.counts[f"refusals.{self._refused_for(state)}"] += 1
            if not self._state.admitted:
                self._state.check_held()
        return needed

    def _refused_for(self, state: ScheduledRequest) -> str:
        if state.request.request_id in self._state.held:
            return "late"
        return "pool" if self._store_has_room(state) else "store"

    def _kept_free(self, state: ScheduledRequest, num_tokens: int, needed: int) -> int:
        """Blocks that must stay free for others when a request gets those it needs.

        Args:
            state: the request.
            num_tokens: tokens that it shall have blocks for.
            needed: blocks that it lacks for them; the slots that are ``due`` come on top.
        """
        request_id = state.request.request_id
        admitted = request_id in self._state.admitted
        if request_id in self._state.held or not self._store_has_room(state):
            return int(self.block_pool.num_gpu_blocks) + 1
        if self._pressure is not None:
            return self._pressure.kept_free(state, num_tokens, needed)
        # Requests that wait cannot reach the threshold, and no running one is preempted for them.
        others = len(self._state.may_go_sparse) - (request_id in self._state.may_go_sparse)
        reserve = self._spec.hot_blocks if others else 0
        if state.due:
            # One that is taken in leaves the reserve alone, or it would soon be preempted for it.
            return 0 if admitted else reserve
        if needed and self._may_go_sparse(state):
            return self._spec.hot_blocks
        return reserve if needed else 0

    def add_local_computed_blocks(
        self, request_id: str, new_computed_blocks: Sequence[KVCacheBlock], *args: int
    ) -> None:
        """A request takes what vLLM's prefix cache has of it, between sink and window nothing."""
        hits = list(new_computed_blocks)
        if self._resumes(request_id):
            start = self._state.requests[request_id].resume_start
            for index in range(self._spec.sink_blocks, min(start, len(hits))):
                hits[index] = self._null_block
        super().add_local_computed_blocks(request_id, hits, *args)

    def allocate_external_computed_blocks(
        self,
        request_id: str,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
        **settings: Any,  # noqa: ANN401 - differs between vLLM's versions
    ) -> None:
        """Blocks for what is loaded from the store, between sink and window none."""
        end = num_local_computed_tokens + num_external_computed_tokens
        if self._resumes(request_id):
            table = self.req_to_blocks[request_id]
            start = self._state.requests[request_id].resume_start
            sink_tokens = min(start, self._spec.sink_blocks) * self.block_size
            missing = sink_tokens - len(table) * self.block_size
            if missing > 0:
                super().allocate_external_computed_blocks(
                    request_id, num_local_computed_tokens, missing, **settings
                )
            table.extend([self._null_block] * (start - len(table)))
            num_local_computed_tokens = len(table) * self.block_size
        super().allocate_external_computed_blocks(
            request_id, num_local_computed_tokens, end - num_local_computed_tokens, **settings
        )

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> list[KVCacheBlock]:
        """Blocks for new tokens, and slots when they are due; slots are not in the block table."""
        blocks: list[KVCacheBlock] = super().allocate_new_blocks(
            request_id, num_tokens, num_tokens_main_model
        )
        state = self._state.requests.get(request_id)
        if state is not None:
            if self._pressure is not None:
                self._pressure.allocated(state, num_tokens, len(blocks))
            if request_id not in self._state.admitted:
                self._state.admit(request_id, self._store_blocks_of(state), self._past_tokens)
            if state.due:
                self._state.take_slots(request_id, self.block_pool.get_new_blocks(state.due))
        return blocks

    def cache_blocks(
        self,
        request: Request,
        num_tokens: int,
        *args: Any,  # noqa: ANN401 - differs between vLLM's versions
        **settings: Any,  # noqa: ANN401
    ) -> None:
        """Let others find full blocks by their content, but for what was computed sparsely."""
        state = self._state.requests.get(request.request_id)
        if state is not None and state.closed_dense is not None:
            num_tokens = min(num_tokens, state.closed_dense * int(self.block_size))
        super().cache_blocks(request, num_tokens, *args, **settings)

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Blocks of a request that ends or is preempted, its slots last."""
        blocks: list[KVCacheBlock] = super().pop_blocks_for_free(request_id)
        state = self._state.requests.get(request_id)
        if state is not None:
            blocks = blocks + self._state.forget(request_id)
        return blocks

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """No block is common to all: each sparse request reads a table of its own."""
        return 0

    def _resumes(self, request_id: str) -> bool:
        state = self._state.requests.get(request_id)
        return state is not None and state.resumes

    def _takes_slots(self, state: ScheduledRequest, num_tokens: int, needed: int) -> bool:
        if state.resumes:
            return not state.hot
        if self._pressure is not None:
            return self._pressure.takes_slots(state, needed)
        past = max(num_tokens, state.request.num_tokens) > self._spec.threshold_tokens
        return past and not state.hot

    def _may_go_sparse(self, state: ScheduledRequest) -> bool:
        return not state.hot and state.most_tokens > self._past_tokens

    def _store_has_room(self, state: ScheduledRequest) -> bool:
        """A request that waits needs all the store blocks it may ever fill."""
        store = self._state.store
        if state.promised or store is None:
            return True
        return self._state.promised + self._store_blocks_of(state) <= store.capacity_blocks

    def _store_blocks_of(self, state: ScheduledRequest) -> int:
        return state.most_tokens // int(self.block_size)
