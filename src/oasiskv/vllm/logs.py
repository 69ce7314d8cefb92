"""What the plugin says in vLLM's log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from oasiskv import __version__
from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.vllm.compat import installed_version
from oasiskv.vllm.plan import MemoryPlan

if TYPE_CHECKING:
    from oasiskv.vllm.scheduling import ScheduledRequest

# Under vLLM's logger, so that its handlers and VLLM_LOGGING_LEVEL apply.
logger = logging.getLogger("vllm.oasiskv")


def log_start(config: OasisConfig, plan: MemoryPlan) -> None:
    """Say once what the engine runs with: every setting, and the memory plan."""
    settings = config.model_dump(mode="json", exclude={"mode", "draft_tokens", "prefill_tokens"})
    settings["threshold_tokens"] = config.resolved_threshold_tokens
    text = " ".join(f"{name}={value}" for name, value in settings.items())
    logger.info("OasisKV %s on vLLM %s: %s", __version__, installed_version(), text)
    logger.info("OasisKV's memory plan per worker: %s", plan)


def log_if_it_stays_dense(
    request: ScheduledRequest, capacity_blocks: int, config: OasisConfig
) -> None:
    """Say of a request that the whole store could not hold it, so that it stays dense."""
    capacity = capacity_blocks * BLOCK_TOKENS
    if request.most_tokens // BLOCK_TOKENS > capacity_blocks:
        logger.warning(
            "request %s stays dense: with its max_tokens it may grow to %d tokens and the host "
            "store holds %d; lower max_tokens or raise host_gib=%s",
            request.request.request_id,
            request.most_tokens,
            capacity,
            config.host_gib,
        )
