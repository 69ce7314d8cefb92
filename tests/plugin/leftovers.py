"""What an engine may leave behind: processes, threads, shared memory."""

import threading
from pathlib import Path

SHARED = "/dev/shm"


def processes(session):
    """Those of a session that have not ended, by id: their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def mapped(process="self"):
    """Files of shared memory that a process has mapped."""
    try:
        maps = Path(f"/proc/{process}/maps").read_text().splitlines()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return set()
    return {line.split()[5] for line in maps if SHARED in line}


def ownerless():
    """Files of shared memory that no process has mapped: nobody will remove them.

    Other tests run beside this one, and what they are about to map or to remove is not mapped for
    a moment: so it is looked for twice.
    """
    return _unmapped() & _unmapped()


def _unmapped():
    there = {str(path) for path in Path(SHARED).iterdir()}
    return there.difference(*(mapped(p.name) for p in Path("/proc").glob("[0-9]*")))


def own():
    """Shared memory, threads and child processes of this process."""
    shared = mapped()
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return shared, {thread.name for thread in threading.enumerate()}, set(children)
