"""What one worker holds: the store, the digests, and the requests between the tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING

import torch

from oasiskv.config import OasisConfig
from oasiskv.core.request import TieredRequest
from oasiskv.core.selection import Selection
from oasiskv.core.tiering import LATEST_QUERIES, Tiering
from oasiskv.drafts.lookahead import lookahead_row
from oasiskv.errors import StateError
from oasiskv.ops.attend.reference import attend
from oasiskv.vllm.memory import PagedKV
from oasiskv.vllm.messages import OasisAck, OasisMetadata
from oasiskv.vllm.settings import geometry_of, sparse_layers, store_capacity_blocks
from oasiskv.vllm.store import AssignedStore

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner


@dataclass(eq=False, kw_only=True)
class WorkerRequest(TieredRequest):
    """One request in a worker.

    Attributes:
        kv: its blocks.
        assigned: store blocks that the scheduler handed out and that no block has taken yet.
        rows: queries of this step, one tensor ``[tokens kept, query heads, head_dim]`` a layer.
    """

    kv: PagedKV
    assigned: list[int] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class WorkerRecord:
    """What an observer sees of one request after each step that gained it tokens.

    Args:
        request: the request, to be read only.
        drafts: drafts that were fed.
        accepted: tokens that the step gained.
        selection: what the next step wants; None while dense or without candidates.
    """

    request: WorkerRequest
    drafts: list[int]
    accepted: list[int]
    selection: Selection | None


class Runtime:
    """Ties vLLM's model runner to the engine-neutral core.

    Args:
        vllm_config: vLLM's configuration.
        config: our settings.
        cache: vLLM's KV-cache groups.
        kv_caches: layer name -> KV tensor.

    Attributes:
        runner: vLLM's model runner; set by the worker.
        requests: by vLLM's request id.
        before_step: called with the runtime before each forward, when all transfers are complete;
            tests disturb the hot set here.
        observer: called with a ``WorkerRecord`` per request and step.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        config: OasisConfig,
        cache: KVCacheConfig | None,
        kv_caches: dict[str, torch.Tensor],
    ) -> None:
        _, names = sparse_layers(cache)
        self.config = config
        self.geometry = geometry_of(vllm_config, cache)
        self._caches = [kv_caches[name] for name in names]
        self.layer_index = {name: index for index, name in enumerate(names)}
        self.store = AssignedStore(self.geometry, store_capacity_blocks(config, self.geometry))
        self.tiering = Tiering(self.geometry, config, self.store, self._caches[0].device)
        self.requests: dict[str, WorkerRequest] = {}
        self.runner: GPUModelRunner | None = None
        self.before_step: Callable[[Runtime], None] | None = None
        self.observer: Callable[[WorkerRecord], None] | None = None
        self.step_number = 0
        self._generations = count()
        self._scheduled: SchedulerOutput | None = None

    @property
    def running(self) -> list[WorkerRequest]:
        """Requests that go through the store and have not ended."""
        return list(self.requests.values())

    def begin_step(self, scheduled: SchedulerOutput) -> None:
        """Take in the scheduler's news, and wait for the transfers of the step before."""
        self.step_number += 1
        self._scheduled = scheduled
        message = scheduled.kv_connector_metadata
        if not isinstance(message, OasisMetadata):
            raise StateError(f"OasisMetadata is needed, found {type(message).__name__}")
        for name in message.dropped:
            self._drop(name)
        for name, news in message.requests.items():
            request = self.requests.get(name) or self._admit(name)
            request.assigned.extend(news.store_blocks)
            request.rows = []
            if news.slots:
                request.kv.slots = torch.tensor(news.slots, dtype=torch.int64)
        self._settle(message)
        if self.before_step is not None:
            self.before_step(self)
            self._settle(message)

    def attend(
        self,
        layer_name: str,
        name: str,
        query: torch.Tensor,
        kv_tokens: int,
        block_table: torch.Tensor,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one request in one layer, its new KV being in place.

        Args:
            layer_name: vLLM's name of the layer.
            name: request id.
            query: ``[tokens, query heads, head_dim]``.
            kv_tokens: tokens of the request, these included.
            block_table: vLLM's row for it.
            scale: softmax scale.

        Returns:
            ``[tokens, query heads, head_dim]``.
        """
        layer = self.layer_index[layer_name]
        request = self.requests.get(name)
        if request is not None:
            kept = query if request.residents is not None else query[-self._kept_rows(name) :]
            request.rows.append(kept.clone())
            if request.pipeline is not None and request.residents is not None:
                request.pipeline.consume(layer, self.step_number)
                block_table, kv_tokens = request.kv.table(kv_tokens, request.residents.filled)
        return attend(query, self._caches[layer], block_table.long(), kv_tokens, scale)

    def after_step(self, output: ModelRunnerOutput) -> OasisAck:
        """Close blocks, go sparse, select and start transfers, once the tokens are known."""
        scheduled = self._scheduled
        if scheduled is None:
            raise StateError("after_step without begin_step")
        self._scheduled = None
        starts: dict[str, int] = {}
        for name, index in output.req_id_to_index.items():
            request = self.requests.get(name)
            if request is not None and name in scheduled.num_scheduled_tokens:
                sampled = output.sampled_token_ids[index] if output.sampled_token_ids else []
                self._after_request(request, scheduled, list(sampled))
                if request.residents is not None:
                    starts[name] = request.kv.window_start
        return OasisAck(starts)

    def _after_request(
        self, request: WorkerRequest, scheduled: SchedulerOutput, sampled: list[int]
    ) -> None:
        name = request.request_id
        drafts = list(scheduled.scheduled_spec_decode_tokens.get(name, []))
        count_ = scheduled.num_scheduled_tokens[name]
        fed = count_ - len(drafts)
        gained = fed + max(0, len(sampled) - 1)
        start = self._computed_before(name)
        request.computed = start + gained
        self.store.assigned = request.assigned
        self.tiering.close_blocks(request, self.step_number)
        queries = torch.stack(request.rows)
        row = 0
        if request.residents is not None:
            # Rows before the last token belong to tokens that were recomputed.
            row = fed - 1 + lookahead_row(self.config.lookahead, drafts, sampled)
        else:
            queries = queries[:, : queries.shape[1] - (count_ - gained)]
        due = bool(sampled) and request.computed > self.config.resolved_threshold_tokens
        selection = self.tiering.after_step(
            request, queries, row, due and len(request.kv.slots) > 0, self.step_number
        )
        if self.observer is not None and sampled:
            self.observer(WorkerRecord(request, drafts, sampled, selection))

    def _computed_before(self, name: str) -> int:
        """Tokens that were in place before this step."""
        runner = self._runner()
        index = runner.input_batch.req_id_to_index[name]
        return int(runner.input_batch.num_computed_tokens_cpu[index])

    def _kept_rows(self, name: str) -> int:
        """Queries to keep of a dense request: the latest, and all drafts."""
        if self._scheduled is None:
            return LATEST_QUERIES
        drafts = self._scheduled.scheduled_spec_decode_tokens.get(name, [])
        return max(LATEST_QUERIES, 1 + len(drafts))

    def _runner(self) -> GPUModelRunner:
        if self.runner is None:
            raise StateError("the worker has not set its model runner")
        return self.runner

    def _admit(self, name: str) -> WorkerRequest:
        def block_ids() -> list[int]:
            blocks: list[int] = self._runner().requests[name].block_ids[0]
            return blocks

        request = WorkerRequest(
            request_id=name,
            generation=next(self._generations),
            kv=PagedKV(self.geometry, self._caches, self.config.sink_blocks, block_ids),
        )
        self.requests[name] = request
        return request

    def _settle(self, message: OasisMetadata) -> None:
        self.tiering.collect()
        for name in message.requests:
            request = self.requests[name]
            if request.pipeline is not None:
                self.tiering.settle(request, request.pipeline)

    def _drop(self, name: str) -> None:
        request = self.requests.pop(name, None)
        if request is not None:
            request.ended = True
            self.tiering.release(request)


_installed: list[Runtime] = []


def install_runtime(runtime: Runtime) -> None:
    """Make ``runtime`` that of this process; an earlier engine's is forgotten."""
    _installed[:] = [runtime]


def current_runtime() -> Runtime:
    """The runtime of this process.

    Raises:
        StateError: no worker has made one.
    """
    if not _installed:
        raise StateError("OasisKV's connector has not been set up in this process")
    return _installed[0]
