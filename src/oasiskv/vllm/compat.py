"""What depends on vLLM's version, or on something of vLLM that is not public."""

from collections.abc import Iterator
from contextlib import contextmanager

from vllm.v1.attention import selector
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend


@contextmanager
def cpu_attention(path: str) -> Iterator[None]:
    """Attention layers made inside take the backend at ``path``.

    On the CPU vLLM ignores the backend asked for and takes its own, but that one may be overridden.
    The override lasts no longer than this, so that another engine of the process is not touched.
    """
    # The choice is remembered by model settings: forget it before and after.
    selector._cached_get_attn_backend.cache_clear()
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        selector._cached_get_attn_backend.cache_clear()
