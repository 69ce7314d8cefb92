"""On the CPU the KV pool and the host store are refused together where memory does not suffice."""

from types import SimpleNamespace

import pytest

from oasiskv.errors import ConfigError
from oasiskv.vllm import cpu_memory
from oasiskv.vllm.cpu_memory import check_cpu_memory
from oasiskv.vllm.settings import CONNECTOR

GIB = 2**30


def config_with(size=None, host_gib=1, platform="cpu", workers=1, local=None):
    """What the check reads of vLLM's configuration."""
    transfer = {"kv_connector": CONNECTOR, "kv_connector_extra_config": {"host_gib": host_gib}}
    return SimpleNamespace(
        device_config=SimpleNamespace(device_type=platform),
        cache_config=SimpleNamespace(kv_cache_memory_bytes=size, gpu_memory_utilization=0.92),
        parallel_config=SimpleNamespace(
            local_world_size=local or workers, tensor_parallel_size=workers
        ),
        kv_transfer_config=SimpleNamespace(**transfer),
    )


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    """Of 24 GiB, a tenth of them in use."""
    monkeypatch.setattr(cpu_memory, "total_bytes", lambda: 24 * GIB)
    monkeypatch.setattr(cpu_memory, "available_bytes", lambda: int(21.6 * GIB))


@pytest.mark.parametrize(
    "asked",
    [
        {"size": int(20.6 * GIB)},
        {"size": 3 * GIB, "workers": 4, "host_gib": 9.5},
        # Two workers of four are here, with half of the store.
        {"size": 5 * GIB, "workers": 4, "local": 2, "host_gib": 23},
        {"platform": "cuda"},
    ],
)
def test_what_fits(asked):
    check_cpu_memory(config_with(**asked))


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "gpu_memory_utilization=0.92 of all memory is 22.0800 GiB for this machine's"),
        ({}, f"set kv_cache_memory_bytes to at most {int(21.6 * GIB) - GIB} less what"),
        ({"size": int(20.6 * GIB) + 1}, "kv_cache_memory_bytes=22119081575 is 20.6001 GiB"),
        ({"size": 3 * GIB, "workers": 4, "host_gib": 9.7}, "workers (4), host_gib=9.7, and"),
        ({"size": GIB, "host_gib": 21.6}, "21.6000 GiB are available; lower host_gib"),
    ],
)
def test_what_does_not(asked, said):
    with pytest.raises(ConfigError) as refused:
        check_cpu_memory(config_with(**asked))
    assert said in str(refused.value)
