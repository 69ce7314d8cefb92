"""vLLM's entry point: make the attention backend known, in every process."""

import os


def register() -> None:
    """Called by vLLM in front end, engine core and workers; may be called again.

    ``OASISKV_DISABLE=1`` makes it do nothing. Light on imports, and never touches a device.
    """
    if os.environ.get("OASISKV_DISABLE") == "1":
        return
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    # On the CPU vLLM ignores the backend asked for and takes this one, overridden or not.
    register_backend(AttentionBackendEnum.CPU_ATTN, "oasiskv.vllm.backend.OasisTorchBackend")
