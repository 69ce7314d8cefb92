"""Engines of several tensor-parallel ranks, each a process of its own, and a window into them."""

import multiprocessing
import os
from contextlib import contextmanager
from unittest import mock

import torch
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.v1.executor import multiproc_executor

import oasiskv.vllm
from oasiskv.testing.in_vllm import FaultyAssignedStore
from oasiskv.testing.refetch import ForcedRefetch
from oasiskv.vllm import store
from oasiskv.vllm.cpu_worker import OasisCPUWorker
from oasiskv.vllm.runtime import current_runtime
from plugin.engines import engine
from plugin.probe import EXACT, SchedulerProbe


class RankWorker(OasisCPUWorker):
    """A worker that does what ``Probe`` does to one in the process of the test.

    Its host store delivers late, twice and out of order, by a seed of the rank; what is held back
    or lost, tests say.
    """

    def __init__(self, vllm_config, *args, **settings):
        super().__init__(vllm_config, *args, **settings)
        # vLLM's ranks wait for one another without giving up their core, which other tests share.
        CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
        self._late, self._lost = set(), set()
        store.MAKE_STORE = self._make_store

    def _make_store(self, geometry, blocks, checksums):
        return FaultyAssignedStore(
            geometry,
            blocks,
            seed=self.rank,
            checksums=checksums,
            late=lambda ticket: (ticket.request_id, ticket.kind) in self._late,
            lose=lambda ticket: (ticket.request_id, ticket.kind) in self._lost,
        )

    def start_probe(self, refetch):
        """Force refetches, and fill blocks that nobody owns with NaN, from now on."""
        self._refetch = ForcedRefetch(self.rank)
        self._forced = refetch
        current_runtime().before_step = self._before_step

    def _before_step(self, runtime):
        for model in runtime.models:
            for cache in model.caches:
                cache[runtime._scheduled.kv_connector_metadata.unowned] = float("nan")
            if self._forced:
                model.settle(list(model.requests))
                self._refetch(model)

    def set_faults(self, rank, late=(), lost=()):
        """Hold back or lose, in one rank, what these ``(request id, kind)`` ask for."""
        if self.rank == rank:
            self._late, self._lost = set(late), set(lost)

    def report(self):
        """What the rank holds."""
        models = current_runtime().models
        target = models[0]
        return {
            "process": os.getpid(),
            "kv_heads": [model.geometry.num_kv_heads for model in models],
            "store_bytes": sum(model.store.nbytes for model in models),
            "store_blocks": {model.store.capacity_blocks for model in models},
            "requests": {name: target.window_start(name) for name in target.requests},
            "kept": set(target.kept),
            "pending": {(ticket.request_id, ticket.kind) for ticket in target.store.pending},
            "digests": sum(model.digests.rows_used for model in models),
            "draining": sum(model.tiering.draining for model in models),
            "fetched_bytes": self._refetch.fetched_bytes,
        }


class RankProbe(SchedulerProbe):
    """A window into an engine of several ranks: the scheduler here, the workers by vLLM's RPC.

    Attributes:
        acks: what the ranks acknowledged together, step by step.
    """

    def __init__(self, llm, refetch=True):
        super().__init__(llm)
        self.acks = []
        self._blank = set()
        connector = self.scheduler.connector
        self._build = connector.build_connector_meta
        self._update = connector.update_connector_output
        connector.build_connector_meta = self._scheduled
        connector.update_connector_output = self._acknowledged
        llm.collective_rpc("start_probe", args=(refetch,))

    def _scheduled(self, scheduler_output):
        message = self._build(scheduler_output)
        unowned = self.watch()
        message.unowned = sorted(unowned - self._blank)
        self._blank = unowned
        return message

    def _acknowledged(self, output):
        ack = output.kv_connector_worker_meta
        self.acks.append(ack)
        self.sparse |= ack.window_start.keys()
        self._update(output)

    def sparse_now(self):
        """Ids of requests that all ranks said are sparse; such a one never is dense again."""
        return self.sparse

    def ranks(self):
        """What each rank reports."""
        return self.llm.collective_rpc("report")

    def set_faults(self, rank, late=(), lost=()):
        """Hold back or lose, in one rank, what these ``(request id, kind)`` ask for."""
        self.llm.collective_rpc("set_faults", args=(rank, late, lost))

    def assert_nothing_known(self):
        """The ranks have heard of all ends."""
        for rank in self.ranks():
            assert not rank["digests"]
            assert not rank["requests"]
            assert not rank["kept"]

    def assert_all_back(self):
        """Nothing is left of ended requests, in the scheduler and in each rank."""
        super().assert_all_back()
        for rank in self.ranks():
            assert not rank["requests"].keys() - self.state.dropped.keys()
            assert not rank["draining"]
            assert not rank["pending"]


@contextmanager
def ranked(folder, refetch=True, settings=None, ranks=2, **engine_args):
    """An engine of several ranks and a probe on it, closed at the end.

    Args:
        folder: the model.
        refetch: force refetches.
        settings: of OasisKV, over ``EXACT``.
        ranks: how many.
        engine_args: of vLLM, over the defaults.
    """
    plugin = oasiskv.vllm.engine_args(**(EXACT | (settings or {})))
    plugin["worker_cls"] = "plugin.ranks.RankWorker"
    args = {"max_model_len": 1024, "tensor_parallel_size": ranks} | plugin | engine_args
    # On the CPU each worker of vLLM imports all of vLLM again; these find it imported. This process
    # cannot be forked itself, for its threads.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with (
        mock.patch.object(multiproc_executor, "get_mp_context", return_value=context),
        engine(folder, **args) as llm,
        torch.inference_mode(),
    ):
        yield RankProbe(llm, refetch)
