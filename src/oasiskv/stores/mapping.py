"""Anonymous memory, and what to say when there is not enough of it."""

import mmap
import resource
from pathlib import Path

from oasiskv.errors import ConfigError
from oasiskv.stores.machine import available_bytes

_GIB = 2**30
_HUGE = Path("/sys/kernel/mm/transparent_hugepage")


def map_memory(nbytes: int) -> mmap.mmap:
    """Map anonymous memory, which nothing has touched yet.

    Args:
        nbytes: how much is needed, rounded up to the system's unit of memory.

    Raises:
        ConfigError: there is not as much.
    """
    available = available_bytes()
    if nbytes > available:
        # Linux would let us map it and kill the process that touches it.
        raise not_so_much(nbytes, available, "this is the memory that is available")
    size = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise not_so_much(nbytes, available, f"the system says: {error.strerror}") from error
    # A fork would copy what is pinned, all of it.
    mapping.madvise(mmap.MADV_DONTFORK)
    if _HUGE.exists():
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def not_so_much(asked: int, had: int, why: str) -> ConfigError:
    """The error to raise where ``had`` of ``asked`` bytes could be had; ``why`` ends a sentence."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / _GIB:.3f} GiB"
    return ConfigError(
        f"the host store needs {asked / _GIB:.3f} GiB of pinned memory, {had / _GIB:.3f} GiB could "
        f"be had: {why}; lower host_gib, or raise what limits it: the container's memory, or what "
        f"may be locked (ulimit -l is {locked}; in a container --ulimit memlock=-1)"
    )
