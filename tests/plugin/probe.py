"""A window into a running engine: what is sparse, which blocks were given back, what leaked."""

from collections import Counter
from contextlib import contextmanager

import torch

import oasiskv.vllm
from oasiskv.testing.batch_refetch import BatchRefetch
from oasiskv.testing.refetch import ForcedRefetch
from oasiskv.vllm.batch_layers import BatchLayers
from oasiskv.vllm.layers import SparseLayers
from oasiskv.vllm.manager import OasisManager
from oasiskv.vllm.runtime import current_runtime
from oasiskv.vllm.scheduling import state_of
from plugin.engines import engine

NGRAM = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
EXACT = {
    "threshold_tokens": 0,
    "budget_tokens": 64,
    "hot_tokens": 448,
    "sink_tokens": 16,
    "window_tokens": 16,
    "host_gib": 0.0625,
    "lookahead": "last_accepted",
}
"""Settings under which the sparse path holds every context of the tests, up to 448 tokens."""


def is_greedy(model, prompt, output, tie=1e-4):
    """Whether each token is the target's choice after those before it, up to a ``tie``."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    chosen = logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
    return bool((logits.max(-1).values - chosen < tie).all())


class SchedulerProbe:
    """What the scheduler side of an engine keeps count of, which is in this process.

    Attributes:
        given_back: request id -> most blocks of its table that vLLM's pool had back at one time.
        sparse: ids of requests that went sparse.
        in_use: most blocks of the pool in use at one time.
        steps: forwards seen.
    """

    def __init__(self, llm):
        self.llm = llm
        self.core = llm.llm_engine.engine_core.engine_core
        self.scheduler = self.core.scheduler
        self.pool = self.scheduler.kv_cache_manager.block_pool
        managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        [self.manager] = [one for one in managers if isinstance(one, OasisManager)]
        self.state = state_of(self.pool)
        self.given_back = Counter()
        self.sparse = set()
        self.in_use = self.steps = 0

    def watch(self):
        """Look at the blocks of a step that is scheduled; returns those that nobody owns."""
        self.steps += 1
        self.assert_counted()
        self.in_use = max(self.in_use, self.used)
        for name, blocks in list(self.manager.req_to_blocks.items()):
            nulls = sum(block.is_null for block in blocks)
            self.given_back[name] = max(self.given_back[name], nulls)
        # What vLLM's prefix cache still offers must keep its content.
        return {
            block.block_id
            for block in self.pool.blocks
            if not block.ref_cnt and not block.is_null and block.block_hash is None
        }

    @property
    def used(self):
        """Blocks of the pool that are not free, the null block apart."""
        return self.pool.num_gpu_blocks - 1 - self.pool.get_num_free_blocks()

    def sparse_now(self):
        """Ids of requests that are sparse in the workers."""
        raise NotImplementedError

    def assert_counted(self):
        """What the scheduler side keeps count of is what a walk over all requests finds."""
        state, tables = self.state, self.manager.req_to_blocks
        assert state.admitted == {name: state.requests[name] for name in tables}
        assert not state.ending
        known = [*state.requests.values(), *state.held.values()]
        assert state.promised == sum(request.promised for request in known)
        assert state.may_go_sparse == {
            name: request
            for name, request in state.requests.items()
            if name in state.admitted
            and request.promised
            and not request.hot
            and request.most_tokens > self.manager._past_tokens
        }
        sparse = self.sparse_now()
        assert state.in_transition == {
            name: request
            for name, request in state.requests.items()
            if request.hot and name not in sparse
        }
        # Of this step's schedule, which has given back what was due.
        assert not state.moved

    def assert_all_back(self):
        """Nothing is left of ended requests: blocks, slots, store blocks."""
        assert self.used == 0
        assert all(not block.ref_cnt for block in self.pool.blocks if not block.is_null)
        assert not self.manager.req_to_blocks
        assert not self.state.requests
        assert not self.state.ending
        assert not self.state.held
        assert not self.state.returned
        self.assert_counted()
        assert self.state.promised == 0
        assert self.state.store.free_blocks == self.state.store.capacity_blocks


class Probe(SchedulerProbe):
    """Runs before each forward: forces refetches, fills blocks that nobody owns with NaN.

    Attributes:
        restarted: requests that went sparse and were dense again later.
        fill: what blocks that nobody owns are filled with.
    """

    def __init__(self, llm, refetch=True):
        super().__init__(llm)
        self.runtime = current_runtime()
        batched = isinstance(self.runtime.target, BatchLayers)
        self.refetch = BatchRefetch(1) if batched else ForcedRefetch(1)
        self.forced = refetch
        self.fill = float("nan")
        self.restarted = set()
        self._blank = set()
        self.runtime.before_step = self

    def __call__(self, runtime):
        unowned = self.watch()
        target = runtime.target
        dense = {name for name in target.requests if target.window_start(name) is None}
        self.restarted |= self.sparse & dense
        self.sparse |= target.requests.keys() - dense
        for model in runtime.models:
            if isinstance(model, BatchLayers):
                # As whoever is handed these blocks does before writing them.
                for name in model.index:
                    model.wait(name)
            for cache in model.caches:
                for block in unowned - self._blank:
                    cache[block] = self.fill
        self._blank = unowned
        if self.forced:
            for model in runtime.models:
                self._disturb(model)

    def _disturb(self, model):
        if isinstance(model, BatchLayers):
            known = list(model.requests.values())
            if model.caches[0].is_cuda:
                torch.cuda.synchronize()
            self.refetch(model.tiering, model.geometry, model.store, model.caches, known)
        else:
            # Requests that are not in this step too.
            model.settle(list(model.requests))
            self.refetch(model)

    def sparse_now(self):
        """Ids of requests that are sparse in the worker."""
        target = self.runtime.target
        return {name for name in target.requests if target.window_start(name) is not None}

    def assert_nothing_known(self):
        """The worker has heard of all ends."""
        for model in self.runtime.models:
            assert not model.digests.rows_used

    def assert_all_back(self):
        """Nothing is left of ended requests: blocks, slots, store blocks, digests, worker state."""
        super().assert_all_back()
        # Workers hear of the last ends with the next step.
        for model in self.runtime.models:
            left = set(model.requests) - set(self.state.dropped)
            assert not left
            held = {block for r in model.requests.values() for block in r.store_blocks}
            assert model.digests.rows_used == len(held)
            if isinstance(model, SparseLayers):
                assert not model.tiering.draining


@contextmanager
def probed(folder, refetch=True, settings=None, **engine_args):
    """An engine with the plugin and a probe on it, closed at the end.

    Args:
        folder: the model.
        refetch: force refetches.
        settings: of OasisKV, over ``EXACT``.
        engine_args: of vLLM, over the defaults.
    """
    plugin = oasiskv.vllm.engine_args(**(EXACT | (settings or {})))
    # The pool of the defaults has to hold a request of max_model_len and its slots.
    args = {"max_model_len": 1024} | plugin | engine_args
    with engine(folder, **args) as llm, torch.inference_mode():
        yield Probe(llm, refetch)
