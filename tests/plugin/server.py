"""``oasiskv serve`` in a process group of its own."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request

import psutil
from openai import OpenAI

from plugin.leftovers import processes

COMMAND = [sys.executable, "-c", "from oasiskv.cli import main; main()", "serve"]
SETTINGS = ["--host-gib", "0.0625", "--budget-tokens=64", "--hot_tokens", "448"]
SETTINGS += ["--threshold-tokens", "64", "--window-tokens", "16", "--lookahead", "last_accepted"]
VLLM = ["--max-model-len", "512", "--max-num-seqs", "16", "--num-gpu-blocks-override", "1000"]
VLLM += ["--enforce-eager", "--dtype", "float32", "--kv-cache-memory-bytes", "67108864"]
STARTED = "Application startup complete"


class Server:
    """A server in a process group of its own, with what it says."""

    def __init__(self, folder):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        command = [*COMMAND, str(folder), *SETTINGS, *VLLM, "--port", str(self.port)]
        environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "OMP_NUM_THREADS": "1"}
        # For its endpoints that reset caches.
        environment["VLLM_SERVER_DEV_MODE"] = "1"
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--served-model-name", "tiny"],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.lines = []
        for line in self.process.stdout:
            self.lines.append(line)
            if STARTED in line:
                break
        else:
            raise AssertionError("".join(self.lines))
        # It says so just before it listens.
        deadline = time.monotonic() + 30
        while not self._listens():
            assert time.monotonic() < deadline
            assert self.process.poll() is None
        self._reader = threading.Thread(target=self.lines.extend, args=(self.process.stdout,))
        self._reader.start()
        self.client = OpenAI(
            base_url=f"http://127.0.0.1:{self.port}/v1", api_key="-", max_retries=0
        )

    def get(self, path, method="GET"):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", method=method)
        with urllib.request.urlopen(request) as answer:
            return answer.status, answer.read().decode()

    def engine(self):
        """Command lines of the engine's processes that have not ended."""
        return [line for line in processes(self.process.pid).values() if "VLLM::" in line]

    def _listens(self):
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def end(self):
        """SIGTERM; returns the exit status and what is left of the process group."""
        group = self.process.pid
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        self._reader.join()
        # Those that end with their parent need a moment to notice.
        _, left = psutil.wait_procs(_members(group), timeout=10)
        return code, left


def _members(group):
    """Processes of a group that have not ended."""
    members = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                members.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            # It ended while we looked.
            continue
    return members
