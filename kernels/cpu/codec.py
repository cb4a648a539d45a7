"""Quantize, pack and unpack, masks and affine codes by the compiled kernels (src/codec, src/stash).

Arguments are those of Backend. ``addresses`` (memory.py) checks the memory of inputs; results are newly allocated.
"""

import math
import os
import threading
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.formats import BFP, BIAS, FixedPoint, Format, GridFormat, Layout, SignedNVInt
from dsq.kernels.backend import AffineCodes, Groups, MovingRanges
from dsq.kernels.cpu.library import SEED_MASK, Library
from dsq.kernels.cpu.memory import addresses

#: guards the state of PyTorch's generator, from when it is read until it is written. A child process begins with a new
#: one: the thread that had it is not in the child
_GENERATOR = threading.RLock()


def _renew_lock() -> None:
    global _GENERATOR
    _GENERATOR = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)
#: the largest number of descriptors in a cache, so that varied shapes do not let a process grow
MAX_DESCRIPTORS = 256
#: the formats that the kernels quantize to, and their scales in ``enum Scales``
SCALES: dict[type[Format], str] = {
    BFP: "POWER",
    FixedPoint: "POWER",
    SignedNVInt: "SIGNED_E4M3",
}
#: the scale and the rule of a GridFormat, and their place in ``enum ScaleRules``
RULES = {
    ("e8m0", "floor"): "E8M0_FLOOR",
    ("e8m0", "ceil"): "E8M0_CEIL",
    ("e8m0", "even"): "E8M0_EVEN",
    ("e8m0", "rceil"): "E8M0_RCEIL",
    ("e4m3", "te"): "E4M3_TE",
    ("e4m3", "clamped"): "E4M3_CLAMPED",
    ("fp32", "amax"): "FP32_AMAX",
}


def supports(fmt: Format) -> bool:
    """Return whether there are kernels of a format: of its scale rule, and of its pairs where a block's bits fill a
    byte."""
    if not isinstance(fmt, GridFormat):
        return True
    return (fmt.scale, fmt.rule) in RULES and (not fmt.pair or (fmt.pair, fmt.block_size) == (2, 16))


class Descriptor(NamedTuple):
    """A format, a layout and dtypes as the kernels read them, and the kernels of the format."""

    desc: Any  #: CodecDesc * or GridDesc *
    quantize: Any
    pack: Any
    unpack: Any
    code_shape: tuple[int, int]
    scale_shape: tuple[int, ...]


class CodecKernels:
    """The kernels of one instruction set, ``isa`` of Library.instruction_sets."""

    def __init__(self, library: Library, isa: int) -> None:
        self.library = library
        self._c = library.c
        self._isa = isa
        self._dtypes = library.dtypes()
        self.descriptor = lru_cache(maxsize=MAX_DESCRIPTORS)(self._new_descriptor)
        self._affine_descriptor = lru_cache(maxsize=MAX_DESCRIPTORS)(self._new_affine_descriptor)
        self._draws_as_torch = lru_cache(self._draws_as_torch_does)

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
            "scales": getattr(self.library.c, SCALES.get(type(fmt), "POWER")),
            "dtype": self._dtypes[dtype],
            "out_dtype": self._dtypes[out_dtype],
            "stochastic": stochastic,
            "isa": self._isa,
        }

    def _new_descriptor(
        self, fmt: Format, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool
    ) -> Descriptor:
        fields, c = self.fields(fmt, layout, dtype, out_dtype, stochastic), self._c
        shapes = layout.code_shape(fmt.bits), fmt.scale_shape(layout)
        if isinstance(fmt, GridFormat):
            desc = self.library.new("GridDesc", self._grid_fields(fmt, layout) | {"codec": fields})
            return Descriptor(desc, c.dsq_quantize_grid, c.dsq_pack_grid, c.dsq_unpack_grid, *shapes)
        return Descriptor(self.library.new("CodecDesc", fields), c.dsq_quantize, c.dsq_pack, c.dsq_unpack, *shapes)

    def _grid_fields(self, fmt: GridFormat, layout: Layout) -> dict[str, Any]:
        """Return the fields of a GridDesc besides ``codec``."""
        rows, columns = fmt.tile(layout)
        one_block = fmt.block == (0, 0)
        if layout.along_rows and not one_block:
            rows, columns = columns, rows
        return {
            "block_rows": rows,
            "block_columns": columns,
            "one_block": one_block,
            "digits": fmt.grid.digits,
            "lowest": fmt.grid.lowest,
            "largest": fmt.grid.largest,
            "rule": getattr(self._c, RULES[fmt.scale, fmt.rule]),
            "pair": fmt.pair,
            "prescale": fmt.prescale,
        }

    def quantize(self, x: Tensor, fmt: Format, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
        y = torch.empty_like(x, dtype=dtype)
        to = self.descriptor(fmt, layout, x.dtype, dtype, seed is not None)
        to.quantize(to.desc, *addresses(x), y.data_ptr(), torch.get_num_threads(), (seed or 0) & SEED_MASK)
        return y

    def pack(self, x: Tensor, fmt: Format, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
        to = self.descriptor(fmt, layout, x.dtype, x.dtype, seed is not None)
        codes = torch.empty(*to.code_shape, dtype=torch.uint8, device="cpu")
        scales = torch.empty(*to.scale_shape, dtype=torch.uint8, device="cpu")
        results = codes.data_ptr(), scales.data_ptr()
        to.pack(to.desc, *addresses(x), *results, torch.get_num_threads(), (seed or 0) & SEED_MASK)
        return codes, scales

    def unpack(self, codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
        y = torch.empty(layout.outer, layout.rows, layout.columns, dtype=dtype, device="cpu")
        of = self.descriptor(fmt, layout, dtype, dtype, False)
        of.unpack(of.desc, *addresses(codes, scales), y.data_ptr(), torch.get_num_threads())
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

    def scale_mask(self, bits: Tensor, x: Tensor, factor: float) -> Tensor:
        y = torch.empty_like(x)
        bits_address, x_address = addresses(bits, x)
        arguments = bits_address, x.numel(), self._dtypes[x.dtype], x_address, factor
        self._c.dsq_scale_mask(self._isa, *arguments, y.data_ptr(), torch.get_num_threads())
        return y

    def bernoulli(self, count: int, p: float, packed: bool) -> Tensor | None:
        return self.draw(count, p, packed) if self._draws_as_torch() else None

    def draw(self, count: int, p: float, packed: bool) -> Tensor:
        """Draw from the state of PyTorch's generator, and move it on, as PyTorch does one by one."""
        out = torch.empty((count + 7) // 8 if packed else count, dtype=torch.uint8, device="cpu")
        with _GENERATOR:
            moved = True
            while moved:  # by another thread that drew from PyTorch, or seeded it
                before = torch.get_rng_state()
                state = before.clone()
                arguments = state.data_ptr(), count, math.ceil(p * 2**53), not packed
                self._c.dsq_bernoulli(self._isa, *arguments, out.data_ptr())
                moved = not torch.equal(torch.get_rng_state(), before)
            torch.set_rng_state(state)
        return out

    def _draws_as_torch_does(self) -> bool:
        """Return whether PyTorch draws ``bernoulli_`` as ``draw`` does: on Intel's processors MKL draws other numbers,
        and a later PyTorch may."""
        with _GENERATOR, torch.random.fork_rng([]):
            before = torch.get_rng_state()
            expected = torch.empty(1000, dtype=torch.uint8, device="cpu").bernoulli_(0.3)
            after = torch.get_rng_state()
            torch.set_rng_state(before)
            return torch.equal(self.draw(1000, 0.3, False), expected) and torch.equal(torch.get_rng_state(), after)

    def relu(self, x: Tensor, in_place: bool) -> tuple[Tensor, Tensor]:
        y = x if in_place else torch.empty_like(x)
        bits = torch.empty((x.numel() + 7) // 8, dtype=torch.uint8, device="cpu")
        results = y.data_ptr(), bits.data_ptr()
        self._c.dsq_relu(self._isa, *addresses(x), x.numel(), *results, torch.get_num_threads())
        if in_place:
            torch.autograd.graph.increment_version(x)
        return y, bits
