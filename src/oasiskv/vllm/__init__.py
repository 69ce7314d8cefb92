"""The vLLM plugin: stock vLLM decodes with its KV cache outside the fast tier."""

from typing import Any

from oasiskv.config import BLOCK_TOKENS, OasisConfig


def engine_args(**settings: Any) -> dict[str, Any]:  # noqa: ANN401 - those of OasisConfig
    """Arguments for ``vllm.LLM`` or ``AsyncEngineArgs``.

    Args:
        settings: those of ``OasisConfig``; ``host_gib`` is needed.

    Raises:
        ConfigError: a setting is unknown or impossible.
    """
    config = OasisConfig(**settings)
    return {
        "worker_cls": "oasiskv.vllm.worker.OasisCPUWorker",
        "block_size": BLOCK_TOKENS,
        "kv_transfer_config": {
            "kv_connector": "OasisConnector",
            "kv_connector_module_path": "oasiskv.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config.model_dump(mode="json", exclude_unset=True),
        },
    }
