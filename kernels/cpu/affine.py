"""Codes between a low and a step of each group by the compiled kernels (src/codec/affine.h); float64 values go to the
reference.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsq.kernels.backend import AffineCodes, Groups
from dsq.kernels.cpu.library import SEED_MASK, Library
from dsq.kernels.cpu.scratch import empty_bytes
from dsq.kernels.reference import affine as reference


class AffineKernels:
    """The kernels of one instruction set, ``isa`` of Library.instruction_sets. Arguments as Backend has them."""

    def __init__(self, library: Library, isa: int) -> None:
        self._library, self._isa, self._dtypes = library, isa, library.dtypes()
        self._desc = lru_cache(maxsize=4096)(self._new_desc)

    def _new_desc(
        self,
        count: int,
        groups: Groups,
        bits: int,
        dtype: torch.dtype,
        stochastic: bool = False,
        own_ranges: bool = False,
    ) -> Any:
        fields = {
            "count": count,
            "run": groups.run,
            "groups": groups.number,
            "bits": bits,
            "dtype": self._dtypes[dtype],
            "stochastic": stochastic,
            "own_ranges": own_ranges,
            "isa": self._isa,
        }
        return self._library.new("AffineDesc", fields)

    def extents(self, x_N: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        if x_N.dtype not in self._dtypes:
            return reference.extents(x_N, groups)
        low_G, high_G = _numbers(groups), _numbers(groups)
        desc, threads = self._desc(x_N.numel(), groups, 8, x_N.dtype), torch.get_num_threads()
        self._library.c.dsq_affine_extents(desc, x_N.data_ptr(), low_G.data_ptr(), high_G.data_ptr(), threads)
        return low_G, high_G

    def pack(
        self, x_N: Tensor, bits: int, groups: Groups, ranges: tuple[Tensor, Tensor] | None, seed: int | None
    ) -> AffineCodes:
        if x_N.dtype not in self._dtypes:
            return reference.pack(x_N, bits, groups, ranges, seed)
        low_G, step_G = ranges or (_numbers(groups), _numbers(groups))
        codes = empty_bytes(((x_N.numel() * bits + 7) // 8,))
        desc = self._desc(x_N.numel(), groups, bits, x_N.dtype, seed is not None, ranges is None)
        self._library.c.dsq_affine_pack(
            desc,
            x_N.data_ptr(),
            low_G.data_ptr(),
            step_G.data_ptr(),
            codes.data_ptr(),
            torch.get_num_threads(),
            (seed or 0) & SEED_MASK,
        )
        return AffineCodes(codes, low_G, step_G)

    def unpack(self, packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
        if dtype not in self._dtypes or packed.step.dtype is not torch.float32:
            return reference.unpack(packed, bits, groups, count, dtype)
        out = torch.empty(count, dtype=dtype, device="cpu")
        addresses = (part.data_ptr() for part in packed)
        desc = self._desc(count, groups, bits, dtype)
        self._library.c.dsq_affine_unpack(desc, *addresses, out.data_ptr(), torch.get_num_threads())
        return out


def _numbers(groups: Groups) -> Tensor:
    return torch.empty(groups.number, dtype=torch.float32, device="cpu")
