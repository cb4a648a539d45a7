"""Quantise, pack and unpack by the compiled kernels (src/codec)."""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, FixedPoint, Format, Layout, check_stored
from dsq.formats.fixed_point import BIAS
from dsq.formats.signed_bfp import SignedBFP
from dsq.formats.signed_nvint import SignedNVInt
from dsq.kernels.cpu.library import SEED_MASK, Library

#: what the kernels quantise to, and what its scales are in ``enum Scales``
SCALES: dict[type[Format], str] = {
    BFP: "POWER",
    FixedPoint: "POWER",
    SignedBFP: "SIGNED_POWER",
    SignedNVInt: "SIGNED_E4M3",
}


class _Prepared(NamedTuple):
    """What calls of the same format, layout and dtypes share."""

    desc: Any  #: CodecDesc *
    code_shape: tuple[int, int]
    scale_shape: tuple[int, ...]


class CodecKernels:
    """The kernels of one instruction set, ``isa`` of Library.instruction_sets."""

    def __init__(self, library: Library, isa: int) -> None:
        self._library, self._isa, self._dtypes = library, isa, library.dtypes()
        self._quantize, self._pack, self._unpack = library.c.dsq_quantize, library.c.dsq_pack, library.c.dsq_unpack
        self.prepared = lru_cache(maxsize=4096)(self._prepare)

    def fields(
        self, fmt: Format, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool
    ) -> dict[str, int]:
        """The fields of a CodecDesc. Raises ValueError for a format that these kernels do not store."""
        check_stored(fmt)
        exponent = fmt.static_exponent if isinstance(fmt, FixedPoint) else None
        return {
            "outer": layout.outer,
            "rows": layout.rows,
            "columns": layout.columns,
            "row_bytes": layout.code_shape(fmt.bits)[1],
            "along_rows": layout.along_rows,
            "bits": fmt.bits,
            "box": fmt.box,
            "static_scale": -1 if exponent is None else exponent + BIAS,
            "scales": getattr(self._library.c, SCALES[type(fmt)]),
            "dtype": self._dtypes[dtype],
            "out_dtype": self._dtypes[out_dtype],
            "stochastic": stochastic,
            "isa": self._isa,
        }

    def _prepare(
        self, fmt: Format, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool
    ) -> _Prepared:
        desc = self._library.new("CodecDesc", self.fields(fmt, layout, dtype, out_dtype, stochastic))
        return _Prepared(desc, layout.code_shape(fmt.bits), fmt.scale_shape(layout))

    def quantize(
        self, x: Tensor, fmt: Format, layout: Layout, seed: int | None, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        """As Backend has it; written to ``out`` where it is given, as the others do."""
        if x.dtype is torch.float64 or dtype is torch.float64:
            return self.quantize(x.float(), fmt, layout, seed, torch.float32).to(dtype)
        if out is None:
            out = torch.empty_like(x, dtype=dtype)
        desc = self.prepared(fmt, layout, x.dtype, dtype, seed is not None).desc
        self._quantize(desc, x.data_ptr(), out.data_ptr(), torch.get_num_threads(), (seed or 0) & SEED_MASK)
        return out

    def pack(
        self, x: Tensor, fmt: Format, layout: Layout, seed: int | None, out: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        if x.dtype is torch.float64:
            x = x.float()
        desc, code_shape, scale_shape = self.prepared(fmt, layout, x.dtype, x.dtype, seed is not None)
        if out is None:  # not by empty_bytes: of a small tensor's time its two calls would be 3 %
            codes = torch.empty(*code_shape, dtype=torch.uint8, device="cpu")
            scales = torch.empty(*scale_shape, dtype=torch.uint8, device="cpu")
        else:
            codes, scales = out
        seed = (seed or 0) & SEED_MASK
        self._pack(desc, x.data_ptr(), codes.data_ptr(), scales.data_ptr(), torch.get_num_threads(), seed)
        return codes, scales

    def unpack(
        self, codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype, out: Tensor | None = None
    ) -> Tensor:
        if dtype is torch.float64:
            return self.unpack(codes, scales, fmt, layout, torch.float32).to(dtype)
        if out is None:
            out = torch.empty(layout.outer, layout.rows, layout.columns, dtype=dtype, device="cpu")
        desc = self.prepared(fmt, layout, dtype, dtype, False).desc
        self._unpack(desc, codes.data_ptr(), scales.data_ptr(), out.data_ptr(), torch.get_num_threads())
        return out
