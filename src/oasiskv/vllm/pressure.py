"""Mode ``under_pressure``: who goes sparse while the pool is short, and what is kept free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from oasiskv.vllm.scheduling import ScheduledRequest, SchedulerState

if TYPE_CHECKING:
    from oasiskv.vllm.spec import OasisSpec


class Pressure:
    """Decides at the start of each step which dense requests take slots in it.

    A request that takes slots in step t gives its blocks back at the start of step t + 1. So at the
    start of a step must be free: S, for one transition; what admitted requests need in this step,
    rests of their prompts included; and what they may need in the next one, for its transitions
    come too late for that. That is the low mark. Below it, or when a request that waits was refused
    for want of blocks, the longest dense requests go sparse, as few as give back what is missing,
    and at most as many at once as leave this step's blocks free.

    Args:
        spec: sizes of a sparse request.
        pool: vLLM's blocks.
        state: the requests.
        tables: blocks of each admitted request by its id, without slots.

    Attributes:
        past_tokens: a request may go sparse once it is longer than that: past the threshold, and
            with more blocks between sink and window than the S that it takes.
    """

    def __init__(
        self,
        spec: OasisSpec,
        pool: BlockPool,
        state: SchedulerState,
        tables: Mapping[str, Sequence[KVCacheBlock]],
    ) -> None:
        self._spec = spec
        self._pool = pool
        self._state = state
        self._tables = tables
        least = spec.sink_blocks + spec.hot_blocks + spec.window_blocks + 1
        self.past_tokens = max(spec.threshold_tokens, least * spec.block_size - 1)
        self._chosen: set[str] = set()
        self._growth = 0
        self._refused = 0

    def start_step(self) -> None:
        """Choose who takes slots in this step; blocks that are due have been given back."""
        refused, self._refused = self._refused, 0
        self._chosen.clear()
        now = self._measure_growth()
        if not self._state.may_go_sparse:
            return
        slots, free = self._spec.hot_blocks, self._free()
        coming = sum(map(self._leaving, self._state.in_transition.values()))
        missing = slots + self._growth - free - coming
        if missing + refused <= 0:
            return
        candidates = self._candidates()
        if missing + refused <= sum(gain for _, gain in candidates):
            missing += refused
        # Otherwise the one that waits could not come in whoever goes sparse for it.
        for name, gain in candidates:
            if missing <= 0 or free - now < slots:
                break
            self._chosen.add(name)
            missing -= gain
            free -= slots

    def takes_slots(self, state: ScheduledRequest, needed: int) -> bool:
        """Whether the request was chosen for this step; it keeps what it gets to its end.

        Args:
            state: the request.
            needed: blocks that it takes beside its slots.
        """
        chosen = state.request.request_id in self._chosen
        return chosen and self._free() - needed >= self._spec.hot_blocks

    def kept_free(self, state: ScheduledRequest, num_tokens: int, needed: int) -> int:
        """Blocks that must stay free for others when a request gets those it needs.

        Args:
            state: the request.
            num_tokens: tokens that it shall have blocks for.
            needed: blocks that it lacks for them; the slots that are due come on top.
        """
        admitted = state.request.request_id in self._state.admitted
        may_go_sparse = not state.resumes and state.most_tokens > self.past_tokens
        due = self._state.may_go_sparse or (not admitted and may_go_sparse)
        # While a transition is under way its slots are the reserve, in use.
        reserve = self._spec.hot_blocks if due and not self._state.in_transition else 0
        if admitted:
            # Its own slots are what the reserve was kept for.
            return reserve if needed and not state.due else 0
        own = self._first_growth(state, num_tokens)
        kept = reserve + self._growth + own
        needed += state.due
        if needed + kept > self._free():
            self._refused = needed + own
        return kept

    def allocated(self, state: ScheduledRequest, num_tokens: int, blocks: int) -> None:
        """A request has got blocks; if it is not admitted yet, its growth comes on top."""
        if state.request.request_id in self._state.admitted:
            self._growth -= blocks
        else:
            self._growth += self._first_growth(state, num_tokens)

    def _measure_growth(self) -> int:
        """Set what admitted requests may take in this step and the next; returns that of this."""
        now = later = 0
        for name, state in self._state.admitted.items():
            held = len(self._tables[name])
            fed = min(state.request.num_tokens_with_spec, state.max_model_len)
            due = max(held, self._blocks(fed))
            now += due - held
            later += self._next_growth(state, due)
        self._growth = now + later
        # Prompts are computed in parts: each request adds at most one block that is not full.
        return min(now, self._blocks(self._state.batch_tokens) + len(self._state.admitted))

    def _first_growth(self, state: ScheduledRequest, num_tokens: int) -> int:
        """What a request may take after its first blocks: the rest of its prompt, and one step."""
        first = self._blocks(num_tokens)
        due = max(first, self._blocks(state.request.num_tokens))
        return due - first + self._next_growth(state, due)

    def _next_growth(self, state: ScheduledRequest, held: int) -> int:
        """Most blocks that one decode step adds to ``held``."""
        decoded = self._state.decode_tokens
        longest = min(state.most_tokens + decoded - 1, state.max_model_len)
        return min(self._blocks(decoded), max(0, self._blocks(longest) - held))

    def _candidates(self) -> list[tuple[str, int]]:
        """Decoding dense requests past the threshold: id and blocks gained, the longest first."""
        found = []
        for name, state in self._state.may_go_sparse.items():
            request = state.request
            computed = request.num_computed_tokens
            # After a preemption the tokens decoded before are computed again.
            decodes = computed >= request.num_prompt_tokens and computed + 1 == request.num_tokens
            if decodes and request.num_tokens > self.past_tokens:
                found.append((request.num_tokens, name, self._leaving(state)))
        found.sort(key=lambda entry: -entry[0])
        slots = self._spec.hot_blocks
        return [(name, leaving - slots) for _, name, leaving in found if leaving > slots]

    def _leaving(self, state: ScheduledRequest) -> int:
        """Blocks that the transition gives back; those that others share stay in the pool."""
        spec, request = self._spec, state.request
        start = request.num_tokens // spec.block_size - spec.window_blocks
        blocks = self._tables[request.request_id][spec.sink_blocks : start]
        return sum(block.ref_cnt == 1 for block in blocks)

    def _free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // int(self._spec.block_size))
