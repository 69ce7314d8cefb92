"""The worker class for CUDA: our spec for full-attention layers, and a turn after the sampler."""

from __future__ import annotations

from typing import Any

from vllm.config import VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu_worker import Worker

from oasiskv.drafts.lookahead import LookaheadMode
from oasiskv.vllm.checks import (
    check_backends,
    check_digests,
    check_engine,
    check_host_memory,
    check_layers,
    check_process,
)
from oasiskv.vllm.runtime import current_runtime, tiers_at_once
from oasiskv.vllm.sampler import HeldBackSampler
from oasiskv.vllm.settings import batch_limits, config_of, stays_dense
from oasiskv.vllm.shapes import block_bytes, digest_bytes, models_of, store_capacity_blocks
from oasiskv.vllm.spec import OasisSpec


class OasisGPUWorker(Worker):
    """vLLM's worker with OasisKV's runtime beside its model runner, on CUDA.

    Where ``stays_dense`` it is vLLM's, and nothing else.

    Raises:
        ConfigError: vLLM's configuration asks for what OasisKV does not support.
    """

    def __init__(self, vllm_config: VllmConfig, *args: Any, **settings: Any) -> None:  # noqa: ANN401
        self._inert = stays_dense(vllm_config)
        if not self._inert:
            check_process()
            check_engine(vllm_config)
        super().__init__(vllm_config, *args, **settings)

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """vLLM's specs, full attention being bounded while decoding."""
        specs: dict[str, KVCacheSpec] = super().get_kv_cache_spec()
        if self._inert:
            return specs
        full = {
            name: spec
            for name, spec in specs.items()
            if type(spec) is FullAttentionSpec and spec.sliding_window is None
        }
        check_layers(self.vllm_config, specs, full)
        check_backends(self.vllm_config, full)
        self._models = models_of(self.vllm_config, full)
        config = config_of(self.vllm_config)
        bounded = {name: OasisSpec.of(spec, config, self._models) for name, spec in full.items()}
        return specs | bounded

    def determine_available_memory(self) -> int:
        """Bytes for vLLM's KV pool: what vLLM finds, less what we need beside it.

        That is the digests and, where requests are tiered at once, their state.
        """
        available: int = super().determine_available_memory()
        if self._inert:
            return available
        config = config_of(self.vllm_config)
        if tiers_at_once(self.vllm_config.device_config.device_type):
            limits = batch_limits(self.vllm_config)
            available -= sum(
                limits.state_bytes(m.geometry, config) + limits.scratch_bytes(m.geometry)
                for m in self._models
            )
        size = block_bytes(self._models)
        blocks = store_capacity_blocks(config, size, self.parallel_config.tensor_parallel_size)
        check_host_memory(blocks * size, self.vllm_config)
        digests = blocks * digest_bytes(config, self._models)
        check_digests(available, digests, blocks)
        return available - digests

    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """One forward, after the transfers of the step before."""
        if self._inert:
            return super().execute_model(scheduler_output)
        runtime = current_runtime()
        if runtime.runner is None:
            runtime.runner = self.model_runner
            self._hold_back_drafts(runtime.config.lookahead)
        runtime.begin_step(scheduler_output)
        return super().execute_model(scheduler_output)

    def _hold_back_drafts(self, mode: LookaheadMode) -> None:
        """Let the runner's own sampler see only the drafts that may be accepted."""
        sampler = getattr(self.model_runner, "rejection_sampler", None)
        if sampler is not None and mode is not LookaheadMode.LAST_ACCEPTED:
            self.model_runner.rejection_sampler = HeldBackSampler(sampler, mode)

    def sample_tokens(self, grammar_output: Any) -> ModelRunnerOutput:  # noqa: ANN401
        """Sampled tokens, and with them what the tiers have acknowledged."""
        output: ModelRunnerOutput = super().sample_tokens(grammar_output)
        if not self._inert and output.kv_connector_output is not None:
            runtime = current_runtime()
            ack = runtime.after_step(output)
            output.kv_connector_output.kv_connector_worker_meta = ack
            output.kv_connector_output.kv_connector_stats = runtime.meter.take()
        return output
