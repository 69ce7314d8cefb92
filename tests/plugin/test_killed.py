"""v51579: an engine that is killed leaves nothing behind, and the next one starts."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from plugin.leftovers import mapped, processes

TESTS = Path(__file__).parents[1]
PATIENCE_S = 60
TRACKER = "multiprocessing.resource_tracker"
"""Python's own, which removes the shared memory of vLLM's message queues when they are gone."""


def kill(session):
    """Kill all processes of a session at once, the tracker apart; it ends by itself."""
    for process, command in processes(session).items():
        if TRACKER not in command:
            os.kill(process, signal.SIGKILL)


def generating(command, environment):
    """A session of its own in which requests run."""
    front_end = subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    if "generating\n" not in iter(front_end.stdout.readline, ""):
        kill(front_end.pid)
        raise AssertionError("the engine did not start")
    return front_end


@pytest.mark.parametrize("restarts", [0, pytest.param(3, marks=pytest.mark.soak)])
def test_v51579_killed_and_started_again(tiny_folder, restarts):
    paths = [str(TESTS), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    command = [sys.executable, str(TESTS / "plugin" / "endless.py"), str(tiny_folder)]
    for _ in range(restarts + 1):
        with generating(command, environment) as front_end:
            assert len(processes(front_end.pid)) >= 3
            shared = set().union(*map(mapped, processes(front_end.pid)))
            assert shared
            kill(front_end.pid)
        deadline = time.monotonic() + PATIENCE_S
        while left := processes(front_end.pid):
            assert time.monotonic() < deadline, left
        assert not [path for path in shared if Path(path).exists()]
