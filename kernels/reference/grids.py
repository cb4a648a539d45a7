"""Quantize, pack and unpack formats that are data (dsq.formats.GridFormat), in float32, on any device.

    scale s of a block      by its rule, from the largest magnitude
    t = round(x m)          to the grid's magnitudes, m the inverse of s; clipped to the largest one
    x' = t s

``round`` is to nearest, ties to even; or stochastic: away from zero if a uniform number (codec.uniform) lies below the
fraction. Products by powers of two are exact. An element's code is the place of its magnitude among all of the grid,
and its sign above. Scales are bytes: those of the blocks, a bit for each pair (MX9), the float32 of the tensor (NVFP4).

Shape suffixes: O outer, A blocks of rows, r rows of a block, B blocks of columns, c columns of a block.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsq.formats import Grid, GridFormat, Layout
from dsq.kernels.reference.codec import pack_bits, uniform, unpack_bits
from dsq.kernels.reference.formats import LARGEST_E4M3

LARGEST_FLOAT32 = torch.finfo(torch.float32).max
SMALLEST_NORMAL_E4M3 = 2.0**-6
#: byte of an E8M0 scale that stands for NaN
E8M0_NAN = 255


def quantize(x: Tensor, fmt: GridFormat, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
    """Return ``x`` rounded to the grid, as ``dtype``: to nearest if ``seed`` is None, else stochastically."""
    t, scales = _encode(x, fmt, layout, seed)
    return _joined(_values(t, scales, fmt), fmt, layout).to(dtype).reshape(x.shape)


def pack(x: Tensor, fmt: GridFormat, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of ``x``: uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    t, scales = _encode(x, fmt, layout, seed)
    codes = _joined(_codes(t, fmt.grid), fmt, layout).reshape(layout.outer * layout.rows, layout.columns)
    return _pack_codes(codes, fmt.bits), scales.stored(fmt)


def unpack(codes: Tensor, scales: Tensor, fmt: GridFormat, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the values of packed ``codes`` as ``dtype``, shape (outer, rows, columns)."""
    indices = _unpack_codes(codes, fmt.bits, layout.columns)
    t = _blocks(_magnitudes(fmt.grid, codes.device)[indices], fmt, layout)
    return _joined(_values(t, _Scales.of(scales, fmt, layout), fmt), fmt, layout).to(dtype)


class _Scales(NamedTuple):
    """What the blocks share, (O, A, 1, B, 1)."""

    scale: Tensor  #: as it is stored: int32 exponents (e8m0), float8 (e4m3), float32; NaN or 128 of a broken block
    of_tensor: Tensor | None  #: float32 (), e4m3's alone
    low: Tensor | None  #: bool (O, A, r, B, c), the pairs of half the step

    def steps(self, fmt: GridFormat) -> Tensor:
        """Return the float32 that elements are multiplied by."""
        if fmt.scale == "e8m0":
            return torch.where(self.scale > 127, torch.nan, _float32_power(self.scale))
        return self.scale if self.of_tensor is None else self.scale.float() * self.of_tensor

    def stored(self, fmt: GridFormat) -> Tensor:
        """Return the bytes of ``fmt.scale_shape``."""
        scale = (self.scale + 127).to(torch.uint8) if fmt.scale == "e8m0" else self.scale.contiguous().view(torch.uint8)
        parts = [scale.flatten()]
        if self.low is not None:
            parts.append(pack_bits(self.low[..., :: fmt.pair].reshape(1, -1), 1)[0])
        if self.of_tensor is not None:
            parts.append(self.of_tensor.view(1).view(torch.uint8))
        return torch.cat(parts)

    @staticmethod
    def of(stored: Tensor, fmt: GridFormat, layout: Layout) -> "_Scales":
        """Return the scales of such bytes."""
        outer, rows, columns = fmt.blocks(layout)
        shape, count = (outer, rows, 1, columns, 1), outer * rows * columns
        if fmt.scale == "e8m0":
            low = None
            if fmt.pair:
                pairs = count * fmt.block[1] // fmt.pair
                low = unpack_bits(stored[None, count:], 1, pairs, torch.uint8).bool()
                low = low.view(outer, rows, 1, columns, fmt.block[1] // fmt.pair).repeat_interleave(fmt.pair, -1)
            return _Scales(stored[:count].view(shape).int() - 127, None, low)
        if fmt.scale == "e4m3":
            of_tensor = stored[count:].clone().view(torch.float32).view(())
            return _Scales(stored[:count].clone().view(torch.float8_e4m3fn).view(shape), of_tensor, None)
        return _Scales(stored.clone().view(torch.float32).view(shape), None, None)


def _encode(x: Tensor, fmt: GridFormat, layout: Layout, seed: int | None) -> tuple[Tensor, _Scales]:
    """Return the elements (O, A, r, B, c), values of the grid, and the scales."""
    v = _blocks(x.float(), fmt, layout)
    largest = v.abs().amax((2, 4), keepdim=True)
    multiplier, scales, broken = _RULES[fmt.scale](largest, fmt)
    t = v * multiplier
    if fmt.pair:
        pairs = v.unflatten(-1, (-1, fmt.pair)).abs().amax(-1)
        low = (_exponent(pairs) < _exponent(largest)).repeat_interleave(fmt.pair, -1)
        t, scales = torch.where(low, t * 2, t), scales._replace(low=low)
    u = None
    if seed is not None:
        u = _blocks(uniform(layout.outer * layout.rows, layout.columns, seed, x.device).float(), fmt, layout)
    t = round_to(fmt.grid, t if fmt.prescale == 1 else t * fmt.prescale, u)
    return t.masked_fill_(broken, 0.0), scales


def _values(t: Tensor, scales: _Scales, fmt: GridFormat) -> Tensor:
    values = (t if scales.low is None else torch.where(scales.low, t * 0.5, t)) * scales.steps(fmt)
    return values if fmt.prescale == 1 else values / fmt.prescale


def round_to(grid: Grid, t: Tensor, u: Tensor | None = None) -> Tensor:
    """Return ``t`` (float32) rounded to the magnitudes of ``grid``, in new memory: to nearest, or by uniform numbers
    ``u``."""
    step = _exponent(t).clamp_(min=grid.lowest).sub_(grid.digits)
    k = t * _float32_power(-step)
    k = k.round_() if u is None else torch.copysign(k.abs().floor() + (u < k.abs().frac()), k)
    return k.mul_(_float32_power(step)).clamp_(-grid.largest, grid.largest)


def _exponent(x: Tensor) -> Tensor:
    """Return floor(log2 |x|) as int32; of zero and of subnormal numbers -127."""
    return (x.contiguous().view(torch.int32) >> 23).bitwise_and_(255).sub_(127)


def _float32_power(exponent: Tensor) -> Tensor:
    """Return 2.0**exponent, exact, for -127 <= exponent <= 127."""
    bits = (exponent + 127) << 23
    return torch.where(exponent == -127, 1 << 22, bits).int().view(torch.float32)


# ---- scale rules: (largest magnitude of each block, format) -> multiplier of values, scales, which blocks are broken

_Ruled = tuple[Tensor, _Scales, Tensor]


def _e8m0(largest: Tensor, fmt: GridFormat) -> _Ruled:
    grid, broken = fmt.grid, ~largest.isfinite()
    a = largest.masked_fill(broken, 0.0)
    if fmt.rule == "rceil":
        a = a / grid.largest
    elif fmt.rule == "even":
        a = (a.view(torch.int32) + (1 << (22 - grid.digits))).view(torch.float32)
    exponent = _exponent(a)
    if fmt.rule in ("ceil", "rceil"):  # a subnormal number of up to 2^-127 has a lower exponent yet
        exponent += (a.view(torch.int32) & 0x7FFFFF) > torch.where(exponent == -127, 1 << 22, 0)
    if fmt.rule != "rceil":
        exponent -= grid.top
    exponent.clamp_(-127, 127)
    return _float32_power(-exponent), _Scales(exponent.masked_fill(broken, E8M0_NAN - 127), None, None), broken


def _e4m3(largest: Tensor, fmt: GridFormat) -> _Ruled:
    largest_element, scale_largest = fmt.grid.largest, LARGEST_E4M3 * fmt.grid.largest
    top = largest.amax() if largest.numel() else largest.new_zeros(())
    finite = top.isfinite()
    top, a = torch.where(finite, top, 1.0), torch.where(finite, largest, 0.0)
    if fmt.rule == "clamped":  # torchao, nvfp4_quantize
        of_tensor = top / scale_largest
        of_tensor = torch.where(of_tensor == 0, 1.0, of_tensor)
        scale = (a / largest_element / of_tensor).clamp(SMALLEST_NORMAL_E4M3, LARGEST_E4M3).to(torch.float8_e4m3fn)
        multiplier = ((1 / of_tensor).clamp(max=LARGEST_FLOAT32) / scale.float()).clamp(max=LARGEST_FLOAT32)
    else:  # TransformerEngine: compute_global_encode_scaling_factor_FP4 and compute_decoding_scaling_factor
        encode = torch.where(top == 0, 1.0, _quotient(scale_largest, top).clamp(max=LARGEST_FLOAT32))
        of_tensor = 1 / encode
        scale = (a * (encode * (1 / largest_element))).clamp(max=LARGEST_E4M3).to(torch.float8_e4m3fn)
        multiplier = (1 / (scale.float() * of_tensor)).clamp(max=LARGEST_FLOAT32)
    of_tensor = torch.where(finite, of_tensor, torch.nan)
    return multiplier, _Scales(scale, of_tensor, None), ~finite


def _fp32(largest: Tensor, fmt: GridFormat) -> _Ruled:
    broken = ~largest.isfinite()
    multiplier = _quotient(fmt.grid.largest, largest.masked_fill(broken, 0.0)).clamp(max=LARGEST_FLOAT32)
    multiplier = torch.where(largest == 0, 1.0, multiplier)
    return multiplier, _Scales((1 / multiplier).masked_fill(broken, torch.nan), None, None), broken


def _quotient(dividend: float, divisor: Tensor) -> Tensor:
    """Return the quotient rounded once: PyTorch's own of a number multiplies by a rounded reciprocal."""
    quotient: Tensor = torch.full_like(divisor, dividend) / divisor
    return quotient


_RULES = {"e8m0": _e8m0, "e4m3": _e4m3, "fp32": _fp32}


# ---- blocks of a tensor, and back


def _blocks(x: Tensor, fmt: GridFormat, layout: Layout) -> Tensor:
    """Return a tensor of this layout as (O, A, r, B, c); short blocks are filled with zeros."""
    shape = outer, rows, columns = fmt.matrix(layout)
    x = x.reshape(outer, columns, rows).mT if layout.along_rows and fmt.block != (0, 0) else x.reshape(shape)
    (height, width), (_, block_rows, block_columns) = fmt.tile(layout), fmt.blocks(layout)
    if (block_rows * height, block_columns * width) != (rows, columns):
        x = pad(x, (0, block_columns * width - columns, 0, block_rows * height - rows))
    return x.reshape(outer, block_rows, height, block_columns, width)


def _joined(v: Tensor, fmt: GridFormat, layout: Layout) -> Tensor:
    """Return the inverse of ``_blocks``: (outer, rows, columns) of the layout."""
    _, rows, columns = fmt.matrix(layout)
    x = v.flatten(3).flatten(1, 2)[:, :rows, :columns]
    if fmt.block == (0, 0):
        return x.reshape(layout.outer, layout.rows, layout.columns)
    return x.mT.contiguous() if layout.along_rows else x


# ---- codes of elements


def _codes(t: Tensor, grid: Grid) -> Tensor:
    """Return the code of each element: the place of its magnitude, and its sign as the highest bit; int32."""
    exponent = _exponent(t).clamp_(min=grid.lowest)
    index = (t.abs() * _float32_power(grid.digits - exponent)).int() + ((exponent - grid.lowest) << grid.digits)
    return index | (t.signbit().int() << (grid.bits - 1))


@lru_cache(maxsize=64)
def _magnitudes(grid: Grid, device: torch.device) -> Tensor:
    """Return the value of each code, float32 (2^bits,); codes that stand for none count on along the grid."""
    index = torch.arange(1 << (grid.bits - 1), device=device)
    binades = ((index >> grid.digits) - 1).clamp_(min=0)
    values = (index - (binades << grid.digits)) * torch.exp2((binades + grid.lowest - grid.digits).double())
    return torch.cat([values, -values]).float()


def _pack_codes(codes_RC: Tensor, bits: int) -> Tensor:
    """Return ``pack_bits``; codes of a byte or half of one without a look at each bit."""
    if bits == 8:
        return codes_RC.to(torch.uint8)
    if bits == 4:
        low, high = pad(codes_RC, (0, codes_RC.shape[1] % 2)).unflatten(1, (-1, 2)).to(torch.uint8).unbind(-1)
        packed: Tensor = low | high << 4
        return packed
    return pack_bits(codes_RC, bits)


def _unpack_codes(packed_RB: Tensor, bits: int, columns: int) -> Tensor:
    if bits == 8:
        return packed_RB.int()
    if bits == 4:
        return torch.stack([packed_RB & 15, packed_RB >> 4], -1).flatten(1)[:, :columns].int()
    return unpack_bits(packed_RB, bits, columns, torch.int32)
