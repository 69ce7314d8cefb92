"""What the plugin says in vLLM's log."""

import logging

from oasiskv import __version__
from oasiskv.config import OasisConfig
from oasiskv.vllm.compat import installed_version
from oasiskv.vllm.plan import MemoryPlan

# Under vLLM's logger, so that its handlers and VLLM_LOGGING_LEVEL apply.
logger = logging.getLogger("vllm.oasiskv")


def log_start(config: OasisConfig, plan: MemoryPlan) -> None:
    """Say once what the engine runs with: every setting, and the memory plan.

    Where vLLM alone would hold more long requests in the same KV memory, that is a warning.
    """
    settings = config.model_dump(mode="json", exclude={"draft_tokens", "prefill_tokens"})
    settings["threshold_tokens"] = config.resolved_threshold_tokens
    text = " ".join(f"{name}={value}" for name, value in settings.items())
    logger.info("OasisKV %s on vLLM %s: %s", __version__, installed_version(), text)
    logger.info("OasisKV's memory plan per worker, of %d: %s", plan.workers, plan)
    if plan.holds_fewer:
        logger.warning(
            "OasisKV holds fewer requests of max_model_len=%d tokens at once (%d) than vLLM alone "
            "(%d): %s",
            plan.longest_tokens,
            plan.sparse_requests,
            plan.dense_requests,
            plan.limit,
        )
