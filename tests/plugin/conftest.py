"""Tests inside vLLM: only where it is installed, in this process, on two-layer random models."""

import gc
import os
from functools import cache
from importlib.util import find_spec

import pytest

from tiny_folder import save_tiny

# vLLM reads these when it is imported or when an engine starts.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    # n-gram drafts import numba, whose threads are torch's too from then on, above OMP_NUM_THREADS.
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


FIRST = ("test_serve.py", "test_tensor_parallel.py")
"""Their engines are processes, which take long to start. A worker without a test left takes half of
another's, the last ones: of these it would start the engines again."""


def pytest_addoption(parser):
    """What to run of test_soak_mixed.py."""
    parser.addoption("--soak-chapters", help="their numbers, after commas")
    parser.addoption("--soak-kinds", help="of requests and disturbances, after commas")


def pytest_collection_modifyitems(config, items):
    """Long tests run only when asked for by name."""
    items.sort(key=lambda item: item.path.name not in FIRST)
    if "soak" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("soak"):
                item.add_marker(pytest.mark.skip(reason="needs -m soak"))


@pytest.fixture(scope="session", autouse=True)
def engines_start_fast():
    """An engine's start and end take a tenth of a second instead of three.

    vLLM collects garbage seven times meanwhile, each time among all that is imported; and from 0.32
    on it looks for its kernels in all modules, to put others in their place for good.
    """
    from vllm.platforms import current_platform

    platform, name = type(current_platform), "register_triton_kernel_overrides"
    with pytest.MonkeyPatch.context() as patch:
        if hasattr(platform, name):
            patch.setattr(platform, name, staticmethod(cache(getattr(platform, name))))
        gc.collect()
        gc.freeze()
        # It would thaw what is imported, too.
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory):
    """A random Llama whose head size vLLM's CPU kernels take, as a Hugging Face folder."""
    return save_tiny(tmp_path_factory.mktemp("model") / "tiny", head_dim=32)
