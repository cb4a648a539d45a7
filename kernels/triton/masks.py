"""Masks of one bit a value on a GPU: launches the kernels of mask_kernels."""

import math

import torch
from torch import Tensor

from dsq.kernels.reference import masks
from dsq.kernels.triton import codec
from dsq.kernels.triton.codec import LOADED, integers_for_bfloat16

#: bytes of a mask a program: 8 to 32 bytes of values a thread
MASK = {"B": 256, "num_warps": 4}


def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """kernels/reference/masks.py on a GPU; float64 goes to PyTorch."""
    if x_N.dtype not in (*LOADED, torch.bool):
        return masks.pack_mask(x_N, low, high, nan_is_open)
    from dsq.kernels.triton.mask_kernels import pack_mask as kernel

    count = x_N.numel()
    bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device=x_N.device)
    if count:
        options = {"FLAGS": x_N.dtype is torch.bool, "NAN_IS_OPEN": nan_is_open, "WIDE": count >= codec.WIDE, **MASK}
        with torch.cuda.device_of(x_N):
            kernel[_mask_programs(bits)](_mask_values(x_N), bits, count, float(low), float(high), **options)
    return bits


def unpack_mask(bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
    """The same; float64 goes to PyTorch."""
    if dtype not in (*LOADED, torch.bool):
        return masks.unpack_mask(bits, count, closed, open, dtype)
    from dsq.kernels.triton.mask_kernels import unpack_mask as kernel

    out = torch.empty(count, dtype=dtype, device=bits.device)
    if count:
        options = {"FLAGS": dtype is torch.bool, "WIDE": count >= codec.WIDE, **MASK}
        with torch.cuda.device_of(bits):
            kernel[_mask_programs(bits)](bits, _mask_values(out), count, float(closed), float(open), **options)
    return out


def apply_mask(bits: Tensor, x_N: Tensor) -> Tensor:
    """The same; float64 goes to PyTorch."""
    if x_N.dtype not in LOADED:
        return masks.apply_mask(bits, x_N)
    from dsq.kernels.triton.mask_kernels import apply_mask as kernel

    out, integers = torch.empty_like(x_N), torch.int32 if x_N.dtype is torch.float32 else torch.int16
    if x_N.numel():
        options = {"WIDE": x_N.numel() >= codec.WIDE, **MASK}
        with torch.cuda.device_of(x_N):
            kernel[_mask_programs(bits)](bits, x_N.view(integers), out.view(integers), x_N.numel(), **options)
    return out


def _mask_programs(bits: Tensor) -> tuple[int]:
    return (-(-bits.numel() // MASK["B"]),)


def _mask_values(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.dtype == torch.bool else integers_for_bfloat16(x)


def relu(x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
    """PyTorch's ReLU, and the mask of the result by the kernel above: two launches."""
    y = torch.nn.functional.relu(x, in_place)
    return y, pack_mask(y.view(-1), 0.0, math.nan, True)
