"""The worker class for the CPU."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from oasiskv.vllm.compat import cpu_attention
from oasiskv.vllm.worker import OasisGPUWorker


class OasisCPUWorker(OasisGPUWorker, CPUWorker):
    """vLLM's CPU worker, which extends its GPU worker, extended as that one is.

    Attention is in plain PyTorch: the oracle for the GPU's, not meant to be fast.
    """

    def load_model(self, *args: Any, **settings: Any) -> None:  # noqa: ANN401 - vLLM's own
        """Load the model, its attention layers being ours."""
        attention = nullcontext() if self._inert else cpu_attention()
        with attention:
            super().load_model(*args, **settings)
