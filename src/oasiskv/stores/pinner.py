"""Registering memory with CUDA: what is registered is pinned, and kernels read it in place."""

import ctypes
from types import ModuleType
from typing import Protocol

import torch

from oasiskv.errors import StateError

# CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM of the driver's cuda.h.
_SAME_ADDRESS = 91
_PCI_ADDRESS_BYTES = 32


class Pinner(Protocol):
    """Pins ranges of memory; a range begins at the system's memory unit."""

    def enter_thread(self) -> None:
        """Called once in each thread that is going to call ``register``."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin a range; returns why it was refused, None if it was not."""

    def unregister(self, address: int) -> str | None:
        """Unpin the range that begins at ``address``; returns why that failed."""

    def settle(self) -> None:
        """Wait for whatever may still read or write pinned memory."""


class CudaPinner:
    """Pins for one GPU.

    Args:
        device: its index.
        cudart: the CUDA runtime, of PyTorch unless given.
    """

    def __init__(self, device: int, cudart: ModuleType | None = None) -> None:
        self._device = device
        self._cudart = cudart or torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """A new thread is on GPU 0, where registering would make a context."""
        torch.cuda.set_device(self._device)

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin a range, for all GPUs. The call lets other Python threads run.

        CUDA keeps an error for the thread's next check, so failing calls belong in short threads.
        """
        return self._error(self._cudart.cudaHostRegister(address, nbytes, 0))

    def unregister(self, address: int) -> str | None:
        """Unpin the range that begins at ``address``."""
        return self._error(self._cudart.cudaHostUnregister(address))

    def settle(self) -> None:
        """Wait for the GPU."""
        torch.cuda.synchronize(self._device)

    def same_address(self) -> bool:
        """Whether kernels find registered memory where the host does.

        So it is on Linux with CUDA, not under WSL 2 and not with ROCm.
        """
        if torch.version.hip is not None:
            return False
        value = ctypes.c_int()
        self._driver("cuDeviceGetAttribute", ctypes.byref(value), _SAME_ADDRESS, self._handle())
        return bool(value.value)

    def pci_address(self) -> str:
        """Of the GPU, as in ``0000:65:00.0``."""
        text = ctypes.create_string_buffer(_PCI_ADDRESS_BYTES)
        self._driver("cuDeviceGetPCIBusId", text, _PCI_ADDRESS_BYTES, self._handle())
        return text.value.decode()

    def _handle(self) -> ctypes.c_int:
        handle = ctypes.c_int()
        self._driver("cuInit", 0)
        self._driver("cuDeviceGet", ctypes.byref(handle), self._device)
        return handle

    def _driver(self, name: str, *arguments: object) -> None:
        """A call of the driver for what PyTorch does not offer in all its versions."""
        code = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
        if code:
            raise StateError(f"{name} failed for GPU {self._device}: error {code} of the driver")

    def _error(self, code: int) -> str | None:
        if int(code) == 0:
            return None
        return f"{self._cudart.cudaGetErrorString(code)} (CUDA error {int(code)})"
