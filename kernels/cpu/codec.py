"""Quantize, pack and unpack, masks and affine codes by the compiled kernels (src/codec).

Arguments are as Backend has them. Inputs pass the gate (memory.py); results were just made.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsq.formats import BFP, BIAS, FixedPoint, Format, Layout, SignedNVInt
from dsq.kernels.backend import AffineCodes, Groups, MovingRanges
from dsq.kernels.cpu.library import SEED_MASK, Library
from dsq.kernels.cpu.memory import addresses

#: descriptors that a cache keeps: varied shapes must not let a process grow
DESCRIPTORS = 256
#: what the kernels quantize to, and what its scales are in ``enum Scales``
SCALES: dict[type[Format], str] = {
    BFP: "POWER",
    FixedPoint: "POWER",
    SignedNVInt: "SIGNED_E4M3",
}


class CodecKernels:
    """The kernels of one instruction set, ``isa`` of Library.instruction_sets."""

    def __init__(self, library: Library, isa: int) -> None:
        self.library, self._c, self._isa, self._dtypes = library, library.c, isa, library.dtypes()
        self._quantize, self._pack, self._unpack = library.c.dsq_quantize, library.c.dsq_pack, library.c.dsq_unpack
        self.prepared = lru_cache(maxsize=DESCRIPTORS)(self._prepare)
        self._affine = lru_cache(maxsize=DESCRIPTORS)(self._new_affine)

    def fields(
        self, fmt: Format, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool
    ) -> dict[str, int]:
        """The fields of a CodecDesc."""
        exponent = fmt.static_exponent if isinstance(fmt, FixedPoint) else None
        return {
            "outer": layout.outer,
            "rows": layout.rows,
            "columns": layout.columns,
            "row_bytes": layout.code_shape(fmt.bits)[1],
            "along_rows": layout.along_rows,
            "bits": fmt.bits,
            "block_size": fmt.block_size,
            "static_scale": -1 if exponent is None else exponent + BIAS,
            "scales": getattr(self.library.c, SCALES[type(fmt)]),
            "dtype": self._dtypes[dtype],
            "out_dtype": self._dtypes[out_dtype],
            "stochastic": stochastic,
            "isa": self._isa,
        }

    def _prepare(
        self, fmt: Format, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool
    ) -> tuple[Any, tuple[int, int], tuple[int, ...]]:
        """CodecDesc *, and the shapes of codes and of scales: what calls of one format, layout and dtypes share."""
        desc = self.library.new("CodecDesc", self.fields(fmt, layout, dtype, out_dtype, stochastic))
        return desc, layout.code_shape(fmt.bits), fmt.scale_shape(layout)

    def quantize(self, x: Tensor, fmt: Format, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
        out = torch.empty_like(x, dtype=dtype)
        desc, _, _ = self.prepared(fmt, layout, x.dtype, dtype, seed is not None)
        self._quantize(desc, *addresses(x), out.data_ptr(), torch.get_num_threads(), (seed or 0) & SEED_MASK)
        return out

    def pack(self, x: Tensor, fmt: Format, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
        desc, code_shape, scale_shape = self.prepared(fmt, layout, x.dtype, x.dtype, seed is not None)
        codes = torch.empty(*code_shape, dtype=torch.uint8, device="cpu")
        scales = torch.empty(*scale_shape, dtype=torch.uint8, device="cpu")
        made, threads = (codes.data_ptr(), scales.data_ptr()), torch.get_num_threads()
        self._pack(desc, *addresses(x), *made, threads, (seed or 0) & SEED_MASK)
        return codes, scales

    def unpack(self, codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
        out = torch.empty(layout.outer, layout.rows, layout.columns, dtype=dtype, device="cpu")
        desc, _, _ = self.prepared(fmt, layout, dtype, dtype, False)
        self._unpack(desc, *addresses(codes, scales), out.data_ptr(), torch.get_num_threads())
        return out

    def _new_affine(self, count: int, groups: Groups, bits: int, dtype: torch.dtype, stochastic: bool) -> Any:
        """AffineDesc *."""
        fields = {"count": count, "run": groups.run, "groups": groups.number, "bits": bits}
        fields |= {"dtype": self._dtypes[dtype], "stochastic": stochastic, "isa": self._isa}
        return self.library.new("AffineDesc", fields)

    def affine_pack(
        self, x: Tensor, bits: int, groups: Groups, running: MovingRanges | None, seed: int | None
    ) -> AffineCodes:
        count = x.numel()
        codes = torch.empty((count * bits + 7) // 8, dtype=torch.uint8, device="cpu")
        ranges = torch.empty(2, groups.number, dtype=torch.float32, device="cpu")
        moving, decay = (None, 0.0) if running is None else running
        desc, threads = self._affine(count, groups, bits, x.dtype, seed is not None), torch.get_num_threads()
        made, seed = (ranges.data_ptr(), codes.data_ptr()), (seed or 0) & SEED_MASK
        self._c.dsq_affine_pack(desc, *addresses(x, moving), decay, *made, threads, seed)
        return AffineCodes(codes, ranges)

    def affine_unpack(self, packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
        codes, ranges = packed
        out = torch.empty(count, dtype=dtype, device="cpu")
        desc = self._affine(count, groups, bits, dtype, False)
        self._c.dsq_affine_unpack(desc, *addresses(codes, ranges), out.data_ptr(), torch.get_num_threads())
        return out

    def pack_mask(self, x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
        dtype = self._c.BYTE if x_N.dtype is torch.bool else self._dtypes[x_N.dtype]
        bits = torch.empty((x_N.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
        given = *addresses(x_N), dtype, x_N.numel(), low, high, nan_is_open
        self._c.dsq_pack_mask(self._isa, *given, bits.data_ptr(), torch.get_num_threads())
        return bits

    def unpack_mask(self, bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        out = torch.empty(count, dtype=dtype, device="cpu")
        given = *addresses(bits), count, self._dtypes[dtype]
        self._c.dsq_unpack_mask(self._isa, *given, out.data_ptr(), torch.get_num_threads())
        return out

    def apply_mask(self, bits: Tensor, x: Tensor) -> Tensor:
        out, (bits_at, x_at) = torch.empty_like(x), addresses(bits, x)
        given = bits_at, x.numel(), self._dtypes[x.dtype], x_at
        self._c.dsq_apply_mask(self._isa, *given, out.data_ptr(), torch.get_num_threads())
        return out

    def relu(self, x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        y, count = x if in_place else torch.empty_like(x), x.numel()
        bits = torch.empty((count + 7) // 8, dtype=torch.uint8, device="cpu")
        made, threads = (y.data_ptr(), bits.data_ptr()), torch.get_num_threads()
        self._c.dsq_relu(self._isa, *addresses(x), count, *made, threads)
        if in_place:
            torch.autograd.graph.increment_version(x)
        return y, bits
