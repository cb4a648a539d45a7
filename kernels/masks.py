"""Masks of one bit a value by the backend of the tensor. For what saved-tensor hooks keep, which no compiler sees: no
operators. kernels/reference/masks.py says what they are.
"""

import torch
from torch import Tensor

from dsq.kernels.dispatch import backend_of, check_types
from dsq.kernels.reference.backend import REFERENCE


def pack_mask(x: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """A bit for each value of ``x`` (of FLOATS, or bool), uint8 (ceil(N / 8),): 1 for those above ``low`` and below
    ``high`` (NaN: no limit), and for NaN if ``nan_is_open``; of bool values for those that are true.
    """
    return backend_of(x).pack_mask(x.detach().contiguous().view(-1), low, high, nan_is_open)


def unpack_mask(bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
    """``count`` values of ``dtype``, (count,): ``open`` where the bit is 1, else ``closed``."""
    _check_mask(bits, count)
    return backend_of(bits).unpack_mask(bits.contiguous(), count, closed, open, dtype)


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """``x`` (of FLOATS, any shape) where the bit is 1, else 0."""
    check_types(x.dtype)
    _check_mask(bits, x.numel())
    if bits.device != x.device:
        raise ValueError(f"bits and x must be on one device, got {bits.device} and {x.device}")
    return backend_of(bits, x).apply_mask(bits.contiguous(), x.detach().contiguous())


def relu(x: Tensor, in_place: bool = False) -> tuple[Tensor, Tensor]:
    """PyTorch's ReLU of ``x`` (of FLOATS), and the mask of the result: above 0, or NaN."""
    return (backend_of(x) if x.is_contiguous() else REFERENCE).relu(x, in_place)


def _check_mask(bits: Tensor, count: int) -> None:
    if bits.shape != ((count + 7) // 8,) or bits.dtype != torch.uint8:
        raise ValueError(f"bits must be uint8 ({(count + 7) // 8},), got {bits.dtype} {tuple(bits.shape)}")
