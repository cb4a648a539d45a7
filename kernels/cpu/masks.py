"""Masks of one bit a value by the native kernels (native/masks.h)."""

import ctypes

import torch
from torch import Tensor

from . import masks
from .backends import ApplyMask, PackMask, Relu, UnpackMask
from .native_plan import DTYPES

#: a bool is a byte of 0 or 1
_DTYPES = {**DTYPES, torch.bool: 3}


def masks_on(library: ctypes.CDLL, isa: int) -> tuple[PackMask, UnpackMask, ApplyMask, Relu]:
    """The masks of ``library`` by instruction set ``isa``. Types that it has no kernels for go to PyTorch."""
    run_pack, run_unpack, run_apply = library.dsq_pack_mask, library.dsq_unpack_mask, library.dsq_apply_mask
    run_relu = library.dsq_relu
    threads = torch.get_num_threads

    def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
        dtype = _DTYPES.get(x_N.dtype)
        if dtype is None:
            return masks.pack_mask(x_N, low, high, nan_is_open)
        count = x_N.numel()
        bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device="cpu")
        run_pack(isa, x_N.data_ptr(), dtype, count, low, high, nan_is_open, bits.data_ptr(), threads())
        return bits

    def unpack_mask(bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
        code = _DTYPES.get(dtype)
        if code is None:
            return masks.unpack_mask(bits, count, closed, open, dtype)
        out = torch.empty(count, dtype=dtype, device="cpu")
        run_unpack(isa, bits.data_ptr(), count, code, closed, open, out.data_ptr(), threads())
        return out

    def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
        code = DTYPES.get(x.dtype)
        if code is None:
            return masks.apply_mask(bits, x)
        out = torch.empty_like(x)
        run_apply(isa, bits.data_ptr(), x.numel(), code, x.data_ptr(), out.data_ptr(), threads())
        return out

    def relu(x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        y, count = x if in_place else torch.empty_like(x), x.numel()
        bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device="cpu")
        run_relu(isa, x.data_ptr(), count, y.data_ptr(), bits.data_ptr(), threads())
        if in_place:
            torch.autograd.graph.increment_version(x)
        return y, bits

    return pack_mask, unpack_mask, apply_mask, relu
