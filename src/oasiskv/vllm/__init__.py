"""The vLLM plugin: stock vLLM decodes with its KV cache outside the fast tier."""

from typing import Any

from oasiskv.config import BLOCK_TOKENS, OasisConfig
from oasiskv.vllm.checks import check_platform
from oasiskv.vllm.compat import (
    DISABLE,
    check_engines_to_come,
    disabled,
    installed_version,
    register_cuda_backend,
)
from oasiskv.vllm.logs import logger
from oasiskv.vllm.made import check_made
from oasiskv.vllm.settings import CONNECTOR, WORKERS, check_settings


def engine_args(**settings: Any) -> dict[str, Any]:  # noqa: ANN401 - those of OasisConfig
    """Arguments for ``vllm.LLM`` or ``AsyncEngineArgs``; none if OASISKV_DISABLE=1.

    Engines that this process configures later with our worker or connector are checked at once.

    Args:
        settings: those of ``OasisConfig``; ``host_gib`` is needed.

    Raises:
        ConfigError: a setting is unknown or impossible, or this vLLM is not supported.
    """
    if disabled():
        logger.warning("%s=1: stock vLLM runs, without OasisKV", DISABLE)
        return {}
    config = OasisConfig(**settings)
    check_settings(config)
    platform = platform_of_engines()
    check_engines_to_come(check_made)
    arguments = {
        "worker_cls": WORKERS[platform],
        "block_size": BLOCK_TOKENS,
        "kv_transfer_config": {
            "kv_connector": CONNECTOR,
            "kv_connector_module_path": "oasiskv.vllm.connector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": config.model_dump(mode="json", exclude_unset=True),
        },
    }
    if platform == "cuda":
        register_cuda_backend()
        # vLLM schedules ahead where it can; what a step accepted is needed before the next.
        arguments |= {"attention_backend": "CUSTOM", "async_scheduling": False}
    return arguments


def platform_of_engines() -> str:
    """The kind of device that vLLM has here.

    Raises:
        ConfigError: it is not supported, or this vLLM is not, or there is none.
    """
    # Imported late: vLLM need not be installed to switch the plugin off or to check settings.
    installed_version()
    from vllm.platforms import current_platform

    platform: str = current_platform.device_type
    check_platform(platform)
    return platform


def register() -> None:
    """vLLM's plugin entry point: run in each of its processes, before anything else."""
    if not disabled():
        from vllm.platforms import current_platform

        if current_platform.device_type == "cuda":
            register_cuda_backend()
