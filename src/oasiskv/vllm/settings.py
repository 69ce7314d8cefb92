"""OasisKV's settings, read from vLLM's configuration."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oasiskv.config import OasisConfig
from oasiskv.core.batch_limits import BatchLimits
from oasiskv.errors import ConfigError
from oasiskv.vllm.compat import DISABLE, disabled

if TYPE_CHECKING:
    from vllm.config import VllmConfig

CONNECTOR = "OasisConnector"
WORKERS = {
    "cpu": "oasiskv.vllm.cpu_worker.OasisCPUWorker",
    "cuda": "oasiskv.vllm.worker.OasisGPUWorker",
}
"""Platform -> worker class."""

VLLM_HAS = {
    "draft_tokens": "speculative_config num_speculative_tokens",
    "prefill_tokens": "max_num_batched_tokens",
}
"""Settings of the reference engine for which vLLM has its own."""


def config_of(vllm_config: VllmConfig) -> OasisConfig:
    """The settings in ``kv_connector_extra_config``, one to one those of ``OasisConfig``.

    Raises:
        ConfigError: there is no such configuration, a setting is not legal, or ``host_gib`` is
            missing.
    """
    transfer = vllm_config.kv_transfer_config
    if transfer is None or transfer.kv_connector != CONNECTOR:
        raise other_connector(transfer and transfer.kv_connector)
    config = OasisConfig(**transfer.kv_connector_extra_config)
    check_settings(config)
    return config


def other_connector(name: str | None) -> ConfigError:
    """The error where vLLM would take connector ``name``: vLLM has flags that choose one."""
    return ConfigError(
        f"kv_transfer_config kv_connector={name} does not go with OasisKV: set kv_connector to "
        f"{CONNECTOR}, as oasiskv.vllm.engine_args() does, and leave out what makes vLLM take "
        "another (kv_offloading_size)"
    )


def is_asked(vllm_config: VllmConfig) -> bool:
    """Whether an engine is to run with OasisKV: with its worker or its connector."""
    transfer = vllm_config.kv_transfer_config
    asked = transfer is not None and transfer.kv_connector == CONNECTOR
    return asked or vllm_config.parallel_config.worker_cls in WORKERS.values()


def stays_dense(vllm_config: VllmConfig) -> bool:
    """Whether the plugin leaves this engine alone: it is switched off, or the model pools.

    A pooling model (embeddings, scores, classes) decodes nothing: all its requests end with their
    prompt, which is dense.
    """
    return disabled() or vllm_config.model_config.runner_type == "pooling"


def check_settings(config: OasisConfig) -> None:
    """Refuse settings that mean nothing to the plugin, rather than ignore them.

    Raises:
        ConfigError: one of them is set, or ``host_gib`` is missing.
    """
    if config.host_gib is None:
        raise ConfigError("host_gib is not set: give the size of the host store, GiB")
    if config.mode == "dense":
        raise ConfigError(
            "mode=dense is not legal in vLLM: it must be 'always' or 'under_pressure'; set "
            f"{DISABLE}=1 to run without OasisKV"
        )
    for name, instead in VLLM_HAS.items():
        if name in config.model_fields_set:
            raise ConfigError(
                f"{name}={getattr(config, name)} is not legal in vLLM: leave it out and set vLLM's "
                f"{instead}"
            )


def batch_limits(vllm_config: VllmConfig) -> BatchLimits:
    """What the state of requests that are tiered at once is sized by."""
    speculative = vllm_config.speculative_config
    return BatchLimits(
        max_requests=vllm_config.scheduler_config.max_num_seqs,
        max_tokens=vllm_config.model_config.max_model_len,
        max_drafts=speculative.num_speculative_tokens if speculative is not None else 0,
        step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
    )
