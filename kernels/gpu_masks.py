"""Masks of one bit a value on the GPU: launches the kernels of gpu_mask_kernels."""

import torch
from torch import Tensor

from . import masks

#: bytes of bits a program: 8 to 32 bytes of values a thread
BYTES = {"B": 256, "num_warps": 4}
#: from here on offsets take 64 bits
WIDE = 1 << 30

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """kernels.masks.pack_mask; float64 goes to PyTorch."""
    if x_N.dtype not in (*_FLOATS, torch.bool):
        return masks.pack_mask(x_N, low, high, nan_is_open)
    from .gpu_mask_kernels import pack_mask as kernel

    count = x_N.numel()
    bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device=x_N.device)
    if count:
        options = {"FLAGS": x_N.dtype is torch.bool, "NAN_IS_OPEN": nan_is_open, "WIDE": count >= WIDE, **BYTES}
        with torch.cuda.device_of(x_N):
            kernel[_programs(bits)](_integers(x_N), bits, count, float(low), float(high), **options)
    return bits


def unpack_mask(bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
    """kernels.masks.unpack_mask; float64 goes to PyTorch."""
    if dtype not in (*_FLOATS, torch.bool):
        return masks.unpack_mask(bits, count, closed, open, dtype)
    from .gpu_mask_kernels import unpack_mask as kernel

    out = torch.empty(count, dtype=dtype, device=bits.device)
    if count:
        options = {"FLAGS": dtype is torch.bool, "WIDE": count >= WIDE, **BYTES}
        with torch.cuda.device_of(bits):
            kernel[_programs(bits)](bits, _integers(out), count, float(closed), float(open), **options)
    return out


def _programs(bits: Tensor) -> tuple[int]:
    return (-(-bits.numel() // BYTES["B"]),)


def _integers(x: Tensor) -> Tensor:
    """bool as bytes, bfloat16 as 16-bit integers."""
    kinds = {torch.bool: torch.uint8, torch.bfloat16: torch.int16}
    return x.view(kinds[x.dtype]) if x.dtype in kinds else x
