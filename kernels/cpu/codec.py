"""Quantize, pack and unpack, masks and affine codes by the compiled kernels (src/codec).

Arguments are those of Backend. ``addresses`` (memory.py) checks the memory of inputs; results are newly allocated.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from dsq.formats import BFP, BIAS, FixedPoint, Format, Layout, SignedNVInt
from dsq.kernels.backend import AffineCodes, Groups, MovingRanges
from dsq.kernels.cpu.library import SEED_MASK, Library
from dsq.kernels.cpu.memory import addresses

#: the largest number of descriptors in a cache, so that varied shapes do not let a process grow
MAX_DESCRIPTORS = 256
#: the formats that the kernels quantize to, and their scales in ``enum Scales``
SCALES: dict[type[Format], str] = {
    BFP: "POWER",
    FixedPoint: "POWER",
    SignedNVInt: "SIGNED_E4M3",
}


class CodecKernels:
    """The kernels of one instruction set, ``isa`` of Library.instruction_sets."""

    def __init__(self, library: Library, isa: int) -> None:
        self.library = library
        self._c = library.c
        self._isa = isa
        self._dtypes = library.dtypes()
        self.descriptor = lru_cache(maxsize=MAX_DESCRIPTORS)(self._new_descriptor)
        self._affine_descriptor = lru_cache(maxsize=MAX_DESCRIPTORS)(self._new_affine_descriptor)

    def fields(
        self, fmt: Format, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool
    ) -> dict[str, int]:
        """Return the fields of a CodecDesc."""
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

    def _new_descriptor(
        self, fmt: Format, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool
    ) -> tuple[Any, tuple[int, int], tuple[int, ...]]:
        """Return a CodecDesc *, and the shapes of codes and of scales, for calls with these arguments."""
        desc = self.library.new("CodecDesc", self.fields(fmt, layout, dtype, out_dtype, stochastic))
        return desc, layout.code_shape(fmt.bits), fmt.scale_shape(layout)

    def quantize(self, x: Tensor, fmt: Format, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
        y = torch.empty_like(x, dtype=dtype)
        desc, _, _ = self.descriptor(fmt, layout, x.dtype, dtype, seed is not None)
        self._c.dsq_quantize(desc, *addresses(x), y.data_ptr(), torch.get_num_threads(), (seed or 0) & SEED_MASK)
        return y

    def pack(self, x: Tensor, fmt: Format, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
        desc, code_shape, scale_shape = self.descriptor(fmt, layout, x.dtype, x.dtype, seed is not None)
        codes = torch.empty(*code_shape, dtype=torch.uint8, device="cpu")
        scales = torch.empty(*scale_shape, dtype=torch.uint8, device="cpu")
        results = codes.data_ptr(), scales.data_ptr()
        self._c.dsq_pack(desc, *addresses(x), *results, torch.get_num_threads(), (seed or 0) & SEED_MASK)
        return codes, scales

    def unpack(self, codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
        y = torch.empty(layout.outer, layout.rows, layout.columns, dtype=dtype, device="cpu")
        desc, _, _ = self.descriptor(fmt, layout, dtype, dtype, False)
        self._c.dsq_unpack(desc, *addresses(codes, scales), y.data_ptr(), torch.get_num_threads())
        return y

    def _new_affine_descriptor(
        self, count: int, groups: Groups, bits: int, dtype: torch.dtype, stochastic: bool
    ) -> Any:
        """Return an AffineDesc *."""
        fields = {"count": count, "run": groups.run, "groups": groups.number, "bits": bits}
        fields |= {"dtype": self._dtypes[dtype], "stochastic": stochastic, "isa": self._isa}
        return self.library.new("AffineDesc", fields)

    def affine_pack(
        self, x: Tensor, bits: int, groups: Groups, running: MovingRanges | None, seed: int | None
    ) -> AffineCodes:
        count = x.numel()
        codes = torch.empty((count * bits + 7) // 8, dtype=torch.uint8, device="cpu")
        ranges = torch.empty(2, groups.number, dtype=torch.float32, device="cpu")
        alpha_beta, decay = (None, 0.0) if running is None else running
        desc = self._affine_descriptor(count, groups, bits, x.dtype, seed is not None)
        arguments = *addresses(x, alpha_beta), decay, ranges.data_ptr(), codes.data_ptr(), torch.get_num_threads()
        self._c.dsq_affine_pack(desc, *arguments, (seed or 0) & SEED_MASK)
        return AffineCodes(codes, ranges)

    def affine_unpack(self, packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
        codes, ranges = packed
        y = torch.empty(count, dtype=dtype, device="cpu")
        desc = self._affine_descriptor(count, groups, bits, dtype, False)
        self._c.dsq_affine_unpack(desc, *addresses(codes, ranges), y.data_ptr(), torch.get_num_threads())
        return y

    def pack_mask(self, x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
        dtype = self._c.BYTE if x_N.dtype is torch.bool else self._dtypes[x_N.dtype]
        bits = torch.empty((x_N.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
        arguments = *addresses(x_N), dtype, x_N.numel(), low, high, nan_is_open
        self._c.dsq_pack_mask(self._isa, *arguments, bits.data_ptr(), torch.get_num_threads())
        return bits

    def unpack_mask(self, bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
        y = torch.empty(count, dtype=dtype, device="cpu")
        arguments = *addresses(bits), count, self._dtypes[dtype]
        self._c.dsq_unpack_mask(self._isa, *arguments, y.data_ptr(), torch.get_num_threads())
        return y

    def apply_mask(self, bits: Tensor, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        bits_address, x_address = addresses(bits, x)
        arguments = bits_address, x.numel(), self._dtypes[x.dtype], x_address
        self._c.dsq_apply_mask(self._isa, *arguments, y.data_ptr(), torch.get_num_threads())
        return y

    def relu(self, x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        y = x if in_place else torch.empty_like(x)
        bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
        results = y.data_ptr(), bits.data_ptr()
        self._c.dsq_relu(self._isa, *addresses(x), x.numel(), *results, torch.get_num_threads())
        if in_place:
            torch.autograd.graph.increment_version(x)
        return y, bits
