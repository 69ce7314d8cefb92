"""Tests inside vLLM: only where it is installed, in this process, on two-layer random models."""

import os
from importlib.util import find_spec

import pytest

from tiny_folder import save_tiny

# vLLM reads these when it is imported or when an engine starts.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    # Of n-gram drafts: threads without work wait busily, and take the core from the rest.
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Several ranks may share a core.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # On the CPU workers do not end when they are asked to, so that vLLM's 5 s are waited in vain.
    "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
}
if find_spec("vllm") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    os.environ.update(SETTINGS)


def pytest_addoption(parser):
    """What to run of test_soak_mixed.py."""
    parser.addoption("--soak-chapters", help="their numbers, after commas")
    parser.addoption("--soak-kinds", help="of requests and disturbances, after commas")


def pytest_collection_modifyitems(config, items):
    """Long tests run only when asked for by name."""
    if "soak" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="needs -m soak"))


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random Llama whose head size vLLM's CPU kernels take, as a Hugging Face folder."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", head_dim=32)
