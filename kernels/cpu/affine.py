"""Codes between a low and a step of each group by the compiled kernels (src/codec/affine.h); float64 values go to the
reference.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsq.kernels.backend import AffineCodes, Groups, Running
from dsq.kernels.cpu.library import SEED_MASK, Library
from dsq.kernels.cpu.scratch import empty_bytes
from dsq.kernels.reference import affine as reference


class AffineKernels:
    """The kernels of one instruction set, ``isa`` of Library.instruction_sets. Arguments as Backend has them."""

    def __init__(self, library: Library, isa: int) -> None:
        self._library, self._isa, self._dtypes = library, isa, library.dtypes()
        self._desc = lru_cache(maxsize=4096)(self._new_desc)

    def _new_desc(self, count: int, groups: Groups, bits: int, dtype: torch.dtype, stochastic: bool = False) -> Any:
        fields = {
            "count": count,
            "run": groups.run,
            "groups": groups.number,
            "bits": bits,
            "dtype": self._dtypes[dtype],
            "stochastic": stochastic,
            "isa": self._isa,
        }
        return self._library.new("AffineDesc", fields)

    def pack(self, x: Tensor, bits: int, groups: Groups, running: Running | None, seed: int | None) -> AffineCodes:
        if x.dtype not in self._dtypes:
            return reference.pack(x, bits, groups, running, seed)
        count = x.numel()
        codes = empty_bytes(((count * bits + 7) // 8,))
        ranges = torch.empty(2, groups.number, dtype=torch.float32, device="cpu")
        self._library.c.dsq_affine_pack(
            self._desc(count, groups, bits, x.dtype, seed is not None),
            x.data_ptr(),
            0 if running is None else running.alpha_beta.data_ptr(),
            0.0 if running is None else running.decay,
            ranges.data_ptr(),
            codes.data_ptr(),
            torch.get_num_threads(),
            (seed or 0) & SEED_MASK,
        )
        return AffineCodes(codes, ranges)

    def unpack(self, packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
        codes, ranges = packed
        if dtype not in self._dtypes or ranges.dtype is not torch.float32:
            return reference.unpack(packed, bits, groups, count, dtype)
        out = torch.empty(count, dtype=dtype, device="cpu")
        desc, threads = self._desc(count, groups, bits, dtype), torch.get_num_threads()
        self._library.c.dsq_affine_unpack(desc, codes.data_ptr(), ranges.data_ptr(), out.data_ptr(), threads)
        return out
