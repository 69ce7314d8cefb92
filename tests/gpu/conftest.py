"""What vLLM reads when it is imported or when an engine starts: all in this process."""

import os
from importlib.util import find_spec

if find_spec("vllm") is not None:
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
