"""What Linux says about this machine: memory that can be had, CPUs near a device."""

from collections.abc import Iterator
from pathlib import Path

# Limit, use, and what of the use the system takes back when it has to: cgroups 2, then 1.
_CGROUPS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def available_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that this process can still have: the machine's and its container's.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    left = (limit - used for limit, used in _in_cgroups(root / "sys/fs/cgroup"))
    return max(0, min([_of_machine(root, "MemAvailable"), *left]))


def total_bytes(root: Path = Path("/")) -> int:
    """Bytes of memory that there are, taken or not: the machine's and its container's.

    Args:
        root: where ``proc`` and ``sys`` are.
    """
    limits = (limit for limit, _ in _in_cgroups(root / "sys/fs/cgroup"))
    return min([_of_machine(root, "MemTotal"), *limits])


def _of_machine(root: Path, name: str) -> int:
    lines = (root / "proc/meminfo").read_text().splitlines()
    machine = dict(line.split(":") for line in lines)
    return 1024 * int(machine[name].split()[0])


def _in_cgroups(folder: Path) -> Iterator[tuple[int, int]]:
    """Bytes that a container may have, and that it has and keeps."""
    for limit_name, used_name, inactive_name in _CGROUPS:
        limit, used = folder / limit_name, folder / used_name
        # The root of the hierarchy has no limit, and no such files.
        if not (limit.exists() and used.exists()) or limit.read_text().strip() == "max":
            continue
        stat = dict(line.split() for line in (used.parent / "memory.stat").read_text().splitlines())
        yield int(limit.read_text()), int(used.read_text()) - int(stat.get(inactive_name, 0))


def numa_cpus(pci_address: str, root: Path = Path("/")) -> set[int] | None:
    """CPUs of the NUMA node that a device hangs on.

    Args:
        pci_address: of the device, as in ``0000:65:00.0``.
        root: where ``sys`` is.

    Returns:
        None where there is one node, where the system does not say which it is, as in many virtual
        machines, or where the node has memory only.
    """
    nodes = root / "sys/devices/system/node"
    told = root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node"
    if len(list(nodes.glob("node[0-9]*"))) < 2 or not told.exists():
        return None
    cpus = nodes / f"node{told.read_text().strip()}" / "cpulist"
    if not cpus.exists():  # Node -1: not known.
        return None
    return _numbers(cpus.read_text().strip()) or None


def _numbers(text: str) -> set[int]:
    """Numbers of a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
