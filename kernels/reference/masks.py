"""One bit a value, in plain PyTorch on any device: the oracle of the backends' masks.

Bit i % 8 of byte i // 8 belongs to value i; the bits past the last value are 0. Values of 16 bits are compared in
float32. Shape suffix: N values.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

#: eight bytes of 0 or 1, read as one little-endian integer and multiplied by this, leave their bits in the top byte
_GATHER = 0x0102040810204080


def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """Which values are open, uint8 (ceil(N / 8),): those above ``low`` and below ``high`` (NaN: no limit), and NaN if
    ``nan_is_open``; of bool values those that are true, whatever the limits.
    """
    if x_N.dtype is torch.bool:
        open_N = x_N
    else:
        if x_N.dtype is not torch.float64:
            x_N = x_N.float()
        open_N = ~((x_N <= low) | (x_N >= high))
        if not nan_is_open:
            open_N &= x_N == x_N
    bytes_N = F.pad(open_N.view(torch.uint8), (0, -open_N.numel() % 8))
    return (bytes_N.view(torch.int64) * _GATHER >> 56).to(torch.uint8)


def unpack_mask(bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
    """``count`` values of ``dtype`` (bool or floating): ``open`` where the bit is 1, else ``closed``."""
    open_N = (bits[:, None] >> torch.arange(8, device=bits.device, dtype=torch.uint8) & 1).view(-1)[:count].bool()
    open_value, closed_value = (torch.full((), value, dtype=dtype, device=bits.device) for value in (open, closed))
    return torch.where(open_N, open_value, closed_value)


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """``x`` (floating, any shape) where the bit is 1, else 0."""
    return torch.where(unpack_mask(bits, x.numel(), False, True, torch.bool).view_as(x), x, torch.zeros_like(x))


def relu(x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's ReLU of ``x``, and the mask of the result: above 0, or NaN."""
    y = F.relu(x, in_place)
    return y, pack_mask(y.contiguous().view(-1), 0.0, math.nan, True)
