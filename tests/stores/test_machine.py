"""What a machine says of its memory and its CPUs, from files such as Linux has."""

import pytest

from oasiskv.stores.machine import available_bytes, numa_cpus, total_bytes

MEMINFO = "MemTotal:       1000 kB\nMemAvailable:   500 kB\nHugePages_Total:       0\n"


def write(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def cgroup(limit):
    return {
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": "300000\n",
        "sys/fs/cgroup/memory.stat": "anon 200000\ninactive_file 90000\n",
    }


def cgroup_1(limit):
    folder = "sys/fs/cgroup/memory/memory"
    return {
        f"{folder}.limit_in_bytes": f"{limit}\n",
        f"{folder}.usage_in_bytes": "300000\n",
        f"{folder}.stat": "rss 200000\ntotal_inactive_file 90000\n",
    }


@pytest.mark.parametrize(
    ("files", "available", "total"),
    [
        ({}, 512_000, 1_024_000),
        (cgroup("max"), 512_000, 1_024_000),
        (cgroup(400_000), 190_000, 400_000),
        (cgroup(10**9), 512_000, 1_024_000),
        (cgroup(100_000), 0, 100_000),
        (cgroup_1(400_000), 190_000, 400_000),
        (cgroup_1(2**63 - 4096), 512_000, 1_024_000),
    ],
)
def test_memory_is_the_machines_or_the_containers(tmp_path, files, available, total):
    root = write(tmp_path, {"proc/meminfo": MEMINFO} | files)
    assert (available_bytes(root), total_bytes(root)) == (available, total)


def test_this_machine_has_some():
    assert 0 < available_bytes() <= total_bytes() < 2**50


def nodes(*cpulists, device="1"):
    files = {f"sys/devices/system/node/node{i}/cpulist": text for i, text in enumerate(cpulists)}
    return files | {"sys/bus/pci/devices/0000:c5:00.0/numa_node": f"{device}\n"}


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (nodes("0-3,8\n", "4-7,12,14-15\n"), {4, 5, 6, 7, 12, 14, 15}),
        (nodes("0-3\n", "4-7\n", device="0"), {0, 1, 2, 3}),
        (nodes("0-3\n", device="0"), None),
        (nodes("0-3\n", "4-7\n", device="-1"), None),
        (nodes("0-3\n", "\n"), None),
        ({}, None),
    ],
)
def test_cpus_near_a_device(tmp_path, files, expected):
    assert numa_cpus("0000:C5:00.0", write(tmp_path, files)) == expected


def test_a_device_that_the_system_does_not_list(tmp_path):
    assert numa_cpus("0000:01:00.0", write(tmp_path, nodes("0\n", "1\n"))) is None
