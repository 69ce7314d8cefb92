"""What the kernels ask of the strides of their tensors."""

from torch import Tensor


def check_last_dim(**tensors: Tensor) -> None:
    """Refuse tensors, given by name, whose last dimension is not contiguous.

    Raises:
        ValueError: naming the first one.
    """
    for name, tensor in tensors.items():
        if tensor.stride(-1) != 1:
            raise ValueError(
                f"the last dimension of {name} must be contiguous; found strides {tensor.stride()}"
            )
