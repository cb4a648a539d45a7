"""Masks of one bit a value by the compiled kernels (src/codec/masks.h); dtypes without a kernel go to the reference."""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.kernels.cpu.library import Library
from dsq.kernels.cpu.scratch import empty_bytes
from dsq.kernels.reference import masks as reference


class MaskKernels:
    """The kernels of one instruction set, ``isa`` of Library.instruction_sets. Arguments as Backend has them."""

    def __init__(self, library: Library, isa: int) -> None:
        self._c, self._isa, self._floats = library.c, isa, library.dtypes()
        self._dtypes = {**self._floats, torch.bool: library.c.BYTE}

    def pack_mask(self, x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
        dtype, count = self._dtypes.get(x_N.dtype), x_N.numel()
        if dtype is None:
            return reference.pack_mask(x_N, low, high, nan_is_open)
        bits, threads = empty_bytes(((count + 7) // 8,)), torch.get_num_threads()
        self._c.dsq_pack_mask(self._isa, x_N.data_ptr(), dtype, count, low, high, nan_is_open, bits.data_ptr(), threads)
        return bits

    def unpack_mask(self, bits: Tensor, count: int, closed: float, open: float, dtype: torch.dtype) -> Tensor:
        code = self._dtypes.get(dtype)
        if code is None:
            return reference.unpack_mask(bits, count, closed, open, dtype)
        out, threads = torch.empty(count, dtype=dtype, device="cpu"), torch.get_num_threads()
        self._c.dsq_unpack_mask(self._isa, bits.data_ptr(), count, code, closed, open, out.data_ptr(), threads)
        return out

    def apply_mask(self, bits: Tensor, x: Tensor) -> Tensor:
        dtype = self._floats.get(x.dtype)
        if dtype is None:
            return reference.apply_mask(bits, x)
        out, threads = torch.empty_like(x), torch.get_num_threads()
        self._c.dsq_apply_mask(self._isa, bits.data_ptr(), x.numel(), dtype, x.data_ptr(), out.data_ptr(), threads)
        return out

    def relu(self, x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        if x.dtype is not torch.float32:
            y = F.relu(x, in_place)
            return y, self.pack_mask(y.view(-1), 0.0, math.nan, True)
        y, count = x if in_place else torch.empty_like(x), x.numel()
        bits, threads = empty_bytes(((count + 7) // 8,)), torch.get_num_threads()
        self._c.dsq_relu(self._isa, x.data_ptr(), count, y.data_ptr(), bits.data_ptr(), threads)
        if in_place:
            torch.autograd.graph.increment_version(x)
        return y, bits
