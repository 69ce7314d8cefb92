"""Shared fixtures: memory that nobody wrote holds NaN, so that reading it shows."""

import os
import signal

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")
# Read when Triton is imported: without a GPU its kernels run in the interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell that runs the tests in the background has them ignore Ctrl-C, and so their children, which
# some tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# On small tensors a second thread mostly waits, and takes the core from whatever else runs.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """``torch.empty`` gives NaN (integers: their largest value) in every test."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)
