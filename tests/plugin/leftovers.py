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


def ownerless():
    """Files of shared memory that no process has mapped: nobody will remove them."""
    there = {str(path) for path in Path(SHARED).iterdir()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            there -= {line.split()[-1] for line in maps.read_text().splitlines() if SHARED in line}
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return there


def own():
    """Shared memory, threads and child processes of this process."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    shared = {line.split()[-1] for line in maps if SHARED in line}
    children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split()
    return shared, {thread.name for thread in threading.enumerate()}, set(children)
