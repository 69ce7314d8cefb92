"""The KV connector: metadata down, acknowledgements up."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from oasiskv.config import OasisConfig
from oasiskv.errors import ConfigError
from oasiskv.stores.prefix import PrefixBlocks
from oasiskv.vllm.checks import check_engine, check_sizes, check_worker, check_workers
from oasiskv.vllm.events import StoreEvents
from oasiskv.vllm.logs import log_start, logger
from oasiskv.vllm.messages import OasisAck, OasisMetadata, RequestMessage
from oasiskv.vllm.plan import plan_of
from oasiskv.vllm.prom import OasisPromMetrics
from oasiskv.vllm.runtime import Runtime, install_runtime, uninstall_runtime
from oasiskv.vllm.scheduling import ScheduledRequest, SchedulerState, state_of
from oasiskv.vllm.settings import config_of, other_connector, stays_dense
from oasiskv.vllm.shapes import sparse_group
from oasiskv.vllm.stats import OasisStats, build_stats, scheduler_stats

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


class OasisConnector(KVConnectorBase_V1, SupportsHMA):
    """One on the scheduler side, one in each worker; vLLM makes both.

    Settings are those of ``OasisConfig``, in ``kv_connector_extra_config``. Where ``stays_dense``
    it does nothing.

    Raises:
        ConfigError: vLLM's configuration asks for what OasisKV does not support, or the tiers are
            too small for one request.
    """

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig | None = None,
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._vllm = vllm_config
        self._state = SchedulerState()
        self._runtime: Runtime | None = None
        self._inert = stays_dense(vllm_config)
        if self._inert:
            return
        check_engine(vllm_config)
        check_worker(vllm_config.parallel_config.worker_cls, vllm_config.device_config.device_type)
        self._config: OasisConfig = config_of(vllm_config)
        if kv_cache_config is None:
            raise ConfigError(
                "vLLM made OasisKV's connector without its KV cache: use a tested version"
            )
        self._cache = kv_cache_config
        self._plan = plan_of(vllm_config, self._config, kv_cache_config)
        self._group = sparse_group(kv_cache_config).index
        check_sizes(self._plan)
        if role is KVConnectorRole.SCHEDULER:
            log_start(self._config, self._plan)

    # Scheduler side.

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Meet the KV-cache manager, which knows the same block pool."""
        if self._inert:
            return
        self._state = state_of(gpu_block_pool)
        self._pool = gpu_block_pool
        self._state.lost_after_s = self._config.transfer_timeout_s
        self._state.store = PrefixBlocks(self._plan.store_blocks, self._plan.block_bytes)
        self._state.restores = len(self._cache.kv_cache_groups) == 1
        caching = bool(self._vllm.cache_config.enable_prefix_caching)
        self._state.shares = caching and self._state.restores
        events = self._vllm.kv_events_config
        if events is not None and events.enable_kv_cache_events:
            spec = self._cache.kv_cache_groups[self._group].kv_cache_spec
            self._state.events = StoreEvents(spec, self._group)
            self._state.store.on_unpublished = self._state.events.unpublished
        speculative = self._vllm.speculative_config
        drafts = speculative.num_speculative_tokens if speculative is not None else 0
        self._state.decode_tokens = 1 + drafts
        self._state.batch_tokens = self._vllm.scheduler_config.max_num_batched_tokens

    def on_new_request(self, request: Request) -> None:
        """A request has arrived."""
        if self._inert:
            return
        self._state.requests[request.request_id] = ScheduledRequest(
            request, self._vllm.model_config.max_model_len
        )

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens whose KV the store holds beyond those that vLLM's own prefix cache gives.

        The request's own, if it was preempted; else those of others, by vLLM's block hashes.
        """
        state = self._state.requests.get(request.request_id)
        if self._inert or state is None or self._state.store is None:
            return 0, False
        if request.skip_reading_prefix_cache:
            # Its own blocks neither: of some versions vLLM would load them.
            return 0, False
        size = self._vllm.cache_config.block_size
        # At least one token has to be computed, for its logits.
        most = (request.num_tokens - 1) // size
        if state.store_blocks:
            state.matched = state.store_blocks[:most]
        elif self._state.shares:
            state.matched = self._state.store.match(request.block_hashes[:most])
        return max(0, len(state.matched) * size - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """The request is admitted: it uses what the store holds of it, some of it to be loaded.

        That is of what vLLM counts as computed, which need not be all that it was told of.
        """
        state = self._state.requests.get(request.request_id)
        if self._inert or state is None or self._state.store is None or state.announced:
            # The next part of a session comes here too.
            return
        size = self._vllm.cache_config.block_size
        counts = self._state.counts
        if not state.store_blocks:
            if self._state.shares and not request.skip_reading_prefix_cache:
                counts["prefix_queried_blocks"] += (request.num_tokens - 1) // size
                counts["prefix_hit_blocks"] += len(state.matched)
            state.store_blocks = state.matched[: state.computed_blocks]
            self._state.store.take(state.store_blocks)
        state.known = len(state.store_blocks)
        ids = blocks.get_block_ids()[self._group]
        loaded = num_external_tokens // size
        end = state.known if loaded else 0
        # Of a sparse request what lies between sink and window does not come back to HBM.
        state.loads = [
            (state.store_blocks[i], ids[i])
            for i in range(end - loaded, end)
            if ids[i] != self._pool.null_block.block_id
        ]
        counts["loaded_blocks"] += len(state.loads)
        state.matched = []

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Store blocks for what may close in this step, and slots that are new."""
        if self._inert:
            return KVConnectorMetadata()
        self._state.forget_ending()
        self._return_slots()
        messages = {}
        scheduled = map(self._state.requests.__getitem__, scheduler_output.num_scheduled_tokens)
        self._state.counts["sparse_steps"] += any(state.window_start for state in scheduled)
        for name, tokens in scheduler_output.num_scheduled_tokens.items():
            state = self._state.requests[name]
            if state.promised and self._state.store is not None:
                messages[name] = self._message(state, tokens, self._state.store)
        dropped, self._state.dropped = self._state.dropped, {}
        return OasisMetadata(messages, dropped)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Workers have acknowledged: the blocks between sink and window may go."""
        ack = connector_output.kv_connector_worker_meta
        if isinstance(ack, OasisAck):
            check_workers(ack.workers, self._vllm)
            self._state.take_in_flight(ack.in_flight)
            self._state.unpublish(ack.damaged)
            for name, stored in ack.stored.items():
                self._state.acknowledge(name, stored, ack.window_start.get(name))
            self._return_slots()

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; vLLM frees its blocks right after."""
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The request has ended; vLLM frees its blocks right after."""
        return False, None

    def reset_cache(self) -> bool:
        """What the store holds is of old weights: nothing of it is found, or read, any more."""
        if not self._inert:
            self._state.reset()
            logger.info("OasisKV's host store was reset: it offers no prefix computed until now")
        return True

    def take_events(self) -> Iterable[KVCacheEvent]:
        """What is found in the store since the last call, and what no longer."""
        events = self._state.events
        return () if events is None else events.take()

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[Any, int]:
        """Where a request's loaded tokens come from, for vLLM's metrics."""
        from vllm.v1.metrics.cache_hit_source import CacheHitSource

        return {CacheHitSource.HOST: num_external_tokens} if num_external_tokens else {}

    @property
    def requires_kv_delivery(self) -> bool:
        """A cache: what it does not hold is computed again."""
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        """Sleep would discard digests, and which block is in which slot."""
        return False

    def _return_slots(self) -> None:
        """Slots that nothing will be written to any more go back to vLLM's pool."""
        slots, self._state.returned = self._state.returned, []
        self._pool.free_blocks(slots)

    def _message(self, state: ScheduledRequest, tokens: int, store: PrefixBlocks) -> RequestMessage:
        end = state.request.num_computed_tokens + tokens
        closed = min(end, state.most_tokens) // self._vllm.cache_config.block_size
        new = store.reserve(max(0, closed - len(state.store_blocks)))
        state.store_blocks.extend(new)
        slots: list[int] = []
        if state.hot and not state.hot_sent:
            slots = [block.block_id for block in state.hot]
            state.hot_sent = True
        state.in_step = True
        if state.announced:
            return RequestMessage(new, slots)
        state.announced = True
        resumed, state.resume_start = state.resume_start, 0
        return RequestMessage(list(state.store_blocks), slots, state.known, state.loads, resumed)

    def get_kv_connector_stats(self) -> OasisStats | None:
        """What the scheduler side counted in this step; a worker's come with what it samples."""
        if self._inert or self.role is not KVConnectorRole.SCHEDULER:
            return None
        size = self._vllm.cache_config.block_size
        return scheduler_stats(self._state, self._config.sink_blocks, size)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> OasisStats:
        """Stats again from what was sent between processes."""
        return build_stats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> OasisPromMetrics | None:
        """The metrics in vLLM's registry; none where all requests stay dense."""
        if stays_dense(vllm_config):
            return None
        return OasisPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # Worker side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's KV tensors are there: make the store and what else the worker needs."""
        if self._inert:
            return
        self._runtime = Runtime(self._vllm, self._config, self._cache, kv_caches)
        install_runtime(self._runtime)

    def shutdown(self) -> None:
        """The engine ends: what its host store had pinned is for the next one, in this process."""
        if self._runtime is not None:
            uninstall_runtime(self._runtime)
            self._runtime = None

    def build_connector_worker_meta(self) -> OasisAck | None:
        """What a step without a forward acknowledges; one with a forward does so once sampled."""
        runtime = self._runtime
        if runtime is None or runtime.computes:
            return None
        return OasisAck({}, {}, *runtime.store_news())

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks by which vLLM finds requests that have failed, and ends them with an error."""
        return self._runtime.failed_blocks() if self._runtime else set()

    def start_load_kv(self, forward_context: ForwardContext, **settings: Any) -> None:  # noqa: ANN401
        """Transfers are waited for before the forward, by the worker."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Transfers are waited for before the forward, by the worker."""

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: Any,  # noqa: ANN401 - vLLM's own
        **settings: Any,  # noqa: ANN401
    ) -> None:
        """Closed blocks are written after the sampler, by the worker."""

    def wait_for_save(self) -> None:
        """Closed blocks are written after the sampler, by the worker."""


def __getattr__(name: str) -> NoReturn:
    """vLLM looks here for another connector where one of its flags has put that in our place."""
    if name.endswith("Connector"):
        raise other_connector(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
