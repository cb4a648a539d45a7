"""The dtypes that are tried, and when two results are the same."""

import torch
from torch import Tensor

#: of tensors, but for float64, which kernels may round to float32 first
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal in shape, type and every bit, but for the payload of a NaN, which differs between devices."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.dtype.is_floating_point:
        integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.dtype.itemsize]
        if not torch.equal(a.isnan(), b.isnan()):
            return False
        a, b = (torch.where(t.isnan(), 0, t).view(integers) for t in (a, b))
    return torch.equal(a, b)


def differing(*results: tuple[str, Tensor, Tensor]) -> list[str]:
    """The names of those, of (name, expected, what the backend gave), in which the two differ."""
    return [name for name, expected, found in results if not same_bits(expected, found.cpu())]
