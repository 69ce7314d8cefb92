"""What one worker holds beside vLLM's model runner, and its turn before and after each forward."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from oasiskv.config import OasisConfig
from oasiskv.errors import StateError, TransferError
from oasiskv.vllm.batch_layers import BatchLayers
from oasiskv.vllm.layers import SparseLayers, StepTokens
from oasiskv.vllm.messages import OasisAck, OasisMetadata
from oasiskv.vllm.settings import batch_limits
from oasiskv.vllm.shapes import block_bytes, models_of, sparse_group, store_capacity_blocks
from oasiskv.vllm.stats import WorkerMeter

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


BATCHED_ON = {"cuda"}
"""Devices on which the requests of a step are tiered at once. Elsewhere they are one by one, which
is what that is compared with."""


def tiers_at_once(device_type: str) -> bool:
    """Whether the requests of a step are tiered at once on such a device."""
    return device_type in BATCHED_ON


@dataclass(frozen=True)
class WorkerRecord:
    """What an observer sees of one request after each step that gained it tokens.

    Args:
        request_id: vLLM's.
        tokens: what the step did to it.
        wanted: blocks that the target's next step wants, ``[layers, heads, K]``, -1 for none; None
            while dense or without candidates.
    """

    request_id: str
    tokens: StepTokens
    wanted: torch.Tensor | None

    @property
    def drafts(self) -> list[int]:
        """Drafts that were fed."""
        return self.tokens.drafts

    @property
    def accepted(self) -> list[int]:
        """Tokens that the step gained."""
        return self.tokens.sampled


class Runtime:
    """Ties vLLM's model runner to the sparse layers of the target and of its draft model.

    Args:
        vllm_config: vLLM's configuration.
        config: our settings.
        cache: vLLM's KV-cache groups.
        kv_caches: layer name -> KV tensor.

    Attributes:
        models: the target's sparse layers, then the draft model's, if there is one.
        meter: what they did, for the metrics.
        runner: vLLM's model runner; set by the worker.
        before_step: called with the runtime before each forward, when all transfers are complete;
            tests disturb the hot set here.
        observer: called with a ``WorkerRecord`` per request and step.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: OasisConfig,
        cache: KVCacheConfig,
        kv_caches: dict[str, torch.Tensor],
    ) -> None:
        self.config = config
        group = sparse_group(cache)
        self._group = group.index
        self._only_group = len(cache.kv_cache_groups) == 1
        models = models_of(vllm_config, group.specs)
        workers = vllm_config.parallel_config.tensor_parallel_size
        capacity = store_capacity_blocks(config, block_bytes(models), workers)
        limits = batch_limits(vllm_config)
        graph_tokens = vllm_config.compilation_config.max_cudagraph_capture_size or 0
        self.models: list[SparseLayers | BatchLayers] = []
        for model in models:
            caches = [kv_caches[name] for name in model.names]
            common = (model, config, caches, capacity, self._block_ids)
            if tiers_at_once(caches[0].device.type):
                batched = BatchLayers(*common, self.computed_before, limits, graph_tokens)
                batched.share_with(kv_caches)
                self.models.append(batched)
            else:
                self.models.append(SparseLayers(*common))
        self.meter = WorkerMeter(self.models, vllm_config.parallel_config.rank)
        self._model_of = {name: model for model in self.models for name in model.index}
        self.runner: GPUModelRunner | None = None
        self.before_step: Callable[[Runtime], None] | None = None
        self.observer: Callable[[WorkerRecord], None] | None = None
        self._scheduled: SchedulerOutput | None = None

    @property
    def target(self) -> SparseLayers | BatchLayers:
        """The target's sparse layers."""
        return self.models[0]

    @property
    def batched(self) -> BatchLayers:
        """The target's sparse layers, where the requests of a step are tiered at once.

        Raises:
            StateError: they are not.
        """
        if not isinstance(self.target, BatchLayers):
            raise StateError("requests are tiered one by one on this device")
        return self.target

    @property
    def computes(self) -> bool:
        """Whether this step has a forward."""
        return self._scheduled is not None and bool(self._scheduled.num_scheduled_tokens)

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """Take in the scheduler's news, and wait for the transfers of the step before."""
        self._scheduled = scheduled
        message = scheduled.kv_connector_metadata
        if not isinstance(message, OasisMetadata):
            raise StateError(f"OasisMetadata is needed, found {type(message).__name__}")
        for sparse in self._one_by_one:
            sparse.unloaded.clear()
        loads = [pair for news in message.requests.values() for pair in news.loads]
        for model in self.models:
            model.step_number += 1
            for name, keep in message.dropped.items():
                model.drop(name, keep)
            for name, news in message.requests.items():
                model.take_news(name, news)
            if loads:
                model.load(loads)
            model.settle(list(message.requests))
        if self.before_step is not None:
            self.before_step(self)
            for model in self.models:
                model.settle(list(message.requests))

    def close(self) -> None:
        """Give the host store back; the runtime is not used again."""
        for model in self.models:
            model.store.close()

    def before_attention(self, layer_name: str, name: str, query: torch.Tensor) -> None:
        """``SparseLayers.before_attention`` of the model that the layer is of."""
        fed = self._scheduled.scheduled_spec_decode_tokens if self._scheduled is not None else {}
        drafts = len(fed.get(name, ()))
        self._model_of[layer_name].before_attention(layer_name, name, query, drafts)

    def table(self, layer_name: str, name: str, kv_tokens: int) -> tuple[torch.Tensor, int] | None:
        """``SparseLayers.table`` of the model that the layer is of."""
        return self._model_of[layer_name].table(name, kv_tokens)

    def after_step(self, output: ModelRunnerOutput) -> OasisAck:
        """Close blocks, go sparse, select and start transfers, once the tokens are known."""
        scheduled = self._scheduled
        if scheduled is None:
            raise StateError("after_step without begin_step")
        self._scheduled = None
        steps = {}
        for name, index in output.req_id_to_index.items():
            if name in self.target.requests and name in scheduled.num_scheduled_tokens:
                sampled = output.sampled_token_ids[index] if output.sampled_token_ids else []
                tokens = StepTokens(
                    start=self.computed_before(name),
                    scheduled=scheduled.num_scheduled_tokens[name],
                    drafts=list(scheduled.scheduled_spec_decode_tokens.get(name, [])),
                    sampled=list(sampled),
                )
                past = tokens.computed > self.config.resolved_threshold_tokens
                steps[name] = (tokens, past and bool(tokens.sampled))
        wanted = [model.after_step(steps, self.observer is not None) for model in self.models]
        if self.observer is not None:
            for name, (tokens, _) in steps.items():
                if tokens.sampled:
                    self.observer(WorkerRecord(name, tokens, wanted[0][name]))
        starts = {name: self.target.window_start(name) for name in steps}
        return OasisAck(
            {name: start for name, start in starts.items() if start is not None},
            {name: min(model.stored(name) for model in self.models) for name in steps},
            *self.store_news(),
        )

    def store_news(self) -> tuple[set[str], set[int]]:
        """``in_flight`` and ``damaged`` of an acknowledgement."""
        models = self._one_by_one
        in_flight = {name for model in models for name in model.in_flight()}
        return in_flight, {block for model in models for block in model.damaged_blocks()}

    def failed_blocks(self) -> set[int]:
        """Blocks by which vLLM finds requests of this step that have failed.

        Those that could not be loaded, and one of each request whose tiles are on no way to come.
        It holds tokens that were in place before the step, or vLLM does not look at it; and it is
        nobody else's. Where there is none, the next steps add one.

        Raises:
            TransferError: a request has failed and vLLM cannot end one of this model.
        """
        requests = [r for model in self._one_by_one for r in model.requests.values() if r.failed]
        found = {block for model in self._one_by_one for block in model.unloaded}
        if requests and not self._only_group:
            # vLLM looks for the block in requests of one KV-cache group only.
            names = ", ".join(request.request_id for request in requests)
            raise TransferError(
                f"the store owes {names} what will not come, and vLLM cannot end single requests "
                "of a model with several KV-cache groups: start the engine again"
            )
        for request in requests:
            name = request.request_id
            if name in self._runner().input_batch.req_id_to_index:
                end = -(-self.computed_before(name) // self.target.geometry.block_tokens)
                others = self._runner().requests.keys() - {name}
                shared = {block for other in others for block in self._blocks_held(other)}
                own = [block for block in request.kv.held(end) if block not in shared]
                found.update(own[-1:])
        return found

    def _blocks_held(self, name: str) -> list[int]:
        """vLLM's blocks of a request, slots apart."""
        request = self._one_by_one[0].requests.get(name)
        ids = self._block_ids(name)
        return ids if request is None else request.kv.held(len(ids))

    @property
    def _one_by_one(self) -> list[SparseLayers]:
        """Models whose requests are tiered one by one.

        Where they are tiered at once, the order on a stream is what nothing is late by.
        """
        return [model for model in self.models if isinstance(model, SparseLayers)]

    def computed_before(self, name: str) -> int:
        """Tokens that were in place before this step."""
        runner = self._runner()
        index = runner.input_batch.req_id_to_index[name]
        return int(runner.input_batch.num_computed_tokens_cpu[index])

    def _block_ids(self, name: str) -> list[int]:
        """vLLM's blocks of a request, stale where given back."""
        blocks: list[int] = self._runner().requests[name].block_ids[self._group]
        return blocks

    def _runner(self) -> GPUModelRunner:
        if self.runner is None:
            raise StateError("the worker has not set its model runner")
        return self.runner


_installed: list[Runtime] = []


def install_runtime(runtime: Runtime) -> None:
    """Make ``runtime`` that of this process."""
    _installed[:] = [runtime]


def uninstall_runtime(runtime: Runtime) -> None:
    """Close ``runtime``, and forget it if it is that of this process."""
    runtime.close()
    if runtime in _installed:
        _installed.clear()


def installed_runtime() -> Runtime | None:
    """The runtime of this process; None while a worker has not made one, as in vLLM's profiling."""
    return _installed[0] if _installed else None


def rows_of_step(count: int) -> tuple[str, ...]:
    """Request ids of the first ``count`` rows of this step; none while vLLM profiles a forward."""
    if not _installed or _installed[0].runner is None:
        return ()
    return tuple(_installed[0].runner.input_batch.req_ids[:count])


def current_runtime() -> Runtime:
    """The runtime of this process.

    Raises:
        StateError: no worker has made one.
    """
    if not _installed:
        raise StateError("OasisKV's connector has not been set up in this process")
    return _installed[0]
