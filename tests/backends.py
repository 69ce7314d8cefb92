"""The reference and the Triton form of an op, for tests that hold both to one definition.

Without CUDA the kernels run in Triton's interpreter (``conftest`` asks for it), with CUDA compiled.
"""

from importlib import import_module
from importlib.util import find_spec

import pytest
import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BACKENDS = [
    "reference",
    pytest.param(
        "triton",
        marks=pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
    ),
]


def load_op(op, function, backend):
    """``function`` of ``oasiskv.ops.<op>``, in one of its forms."""
    return getattr(import_module(f"oasiskv.ops.{op}.{backend}"), function)


def far_view(shape, block_stride, dtype, monkeypatch):
    """A view whose blocks lie ``block_stride`` elements apart, memory touched only where used."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    strides = [1]
    for size in reversed(shape[2:]):
        strides.insert(0, strides[0] * size)
    elements = (shape[0] - 1) * block_stride + shape[1] * strides[0]
    storage = torch.empty(elements, dtype=dtype, device=DEVICE)
    return storage.as_strided(shape, (block_stride, *strides))


def same_bits(a, b):
    """Equal with NaN equal to NaN: free memory must stay as it was."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(nan=12345.0), b.nan_to_num(nan=12345.0)
    )
