"""The oracle: every kernel in plain PyTorch, in float64, on any device. Other backends must give the same bits.

    E    = max floor(log2|x|) over a box, at least -127; 255 - 127 where the box holds a NaN or an infinity
    t    = x * 2**(bits - 2 - E)                           exact in float64
    code = clip(round(t), -(2**(bits-1) - 1), 2**(bits-1) - 1)
    x'   = code * 2**(E - (bits - 2))

``round`` is to nearest, ties to even; or stochastic: away from zero when a uniform number lies below the fraction of
``|t|``. Shape suffixes: O outer, R rows, C columns (kernels.grid.Layout).
"""

import torch
from torch import Tensor

from .grid import BIAS, NAN_EXPONENT, Grid, Layout
from .philox import uniform


def quantize(x: Tensor, grid: Grid, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
    """``x`` rounded to the grid, as ``dtype``; ``seed`` None rounds to nearest, a number stochastically."""
    x_ORC, exponents = _exponents(x, grid, layout)
    return _decode(_encode(x_ORC, exponents, grid, layout, seed), exponents, grid, layout, dtype).view(x.shape)


def pack(x: Tensor, grid: Grid, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
    """Codes and exponents of ``x`` as uint8 tensors of ``layout.code_shape`` and ``layout.exponent_shape``."""
    x_ORC, exponents = _exponents(x, grid, layout)
    codes = _encode(x_ORC, exponents, grid, layout, seed)
    return _pack_bits(codes.view(layout.outer * layout.rows, layout.columns), grid.bits), exponents


def unpack(codes: Tensor, exponents: Tensor, grid: Grid, layout: Layout, dtype: torch.dtype) -> Tensor:
    """The values of packed ``codes`` as ``dtype``, shape (outer, rows, columns)."""
    codes_ORC = _unpack_bits(codes, grid.bits, layout.columns).view(layout.outer, layout.rows, layout.columns)
    return _decode(codes_ORC, exponents, grid, layout, dtype)


def _exponents(x: Tensor, grid: Grid, layout: Layout) -> tuple[Tensor, Tensor]:
    """``x`` as (outer, rows, columns) in float64 (rounded to float32 first), and each box's stored exponent."""
    x_ORC = x.to(torch.float32).to(torch.float64).reshape(layout.outer, layout.rows, layout.columns)
    largest = _box_max(x_ORC.abs(), grid, layout)
    finite = torch.isfinite(largest)
    if grid.exponent is None:
        stored = torch.frexp(torch.where(finite, largest, 0.0)).exponent - 1 + BIAS
        stored = torch.where(largest == 0, 0, stored.clamp(min=0))
    else:
        stored = torch.full_like(largest, grid.exponent + BIAS)
    stored = torch.where(finite, stored, NAN_EXPONENT)
    return x_ORC, stored.to(torch.uint8).view(layout.exponent_shape(grid.box))


def _box_max(a_ORC: Tensor, grid: Grid, layout: Layout) -> Tensor:
    if grid.box == 0:
        return a_ORC.amax().view(1) if a_ORC.numel() else a_ORC.new_zeros(1)
    dim = 1 if layout.along_rows else 2
    boxes = -(-a_ORC.shape[dim] // grid.box)
    padding = boxes * grid.box - a_ORC.shape[dim]
    padded = torch.nn.functional.pad(a_ORC, (0, 0, 0, padding) if layout.along_rows else (0, padding))
    return padded.unflatten(dim, (boxes, grid.box)).amax(dim + 1)


def _per_value(exponents: Tensor, grid: Grid, layout: Layout) -> Tensor:
    """Stored exponents, int64, spread to a shape that broadcasts against (outer, rows, columns)."""
    wide = exponents.long()
    if grid.box == 0:
        return wide.view(1, 1, 1)
    if layout.along_rows:
        return wide.repeat_interleave(grid.box, dim=1)[:, : layout.rows]
    spread = wide.repeat_interleave(grid.box, dim=1)[:, : layout.columns]
    return spread.view(layout.outer, layout.rows, layout.columns)


def _encode(x_ORC: Tensor, exponents: Tensor, grid: Grid, layout: Layout, seed: int | None) -> Tensor:
    stored = _per_value(exponents, grid, layout)
    t = x_ORC * _power_of_two(grid.bits - 2 - (stored - BIAS))
    if seed is None:
        rounded = torch.round(t)
    else:
        u_RC = uniform(layout.outer * layout.rows, layout.columns, seed, t.device)
        whole = t.abs().clamp(max=grid.max_code).floor()
        rounded = torch.copysign(whole + (u_RC.view(t.shape) < t.abs() - whole), t)
    rounded = rounded.clamp(-grid.max_code, grid.max_code)
    return torch.where(stored == NAN_EXPONENT, 0.0, rounded).to(torch.int64)


def _decode(codes: Tensor, exponents: Tensor, grid: Grid, layout: Layout, dtype: torch.dtype) -> Tensor:
    stored = _per_value(exponents, grid, layout)
    values = codes * _power_of_two(stored - BIAS - (grid.bits - 2))
    return torch.where(stored == NAN_EXPONENT, torch.nan, values).to(torch.float32).to(dtype)


def _power_of_two(exponent: Tensor) -> Tensor:
    """2.0**exponent, built from the bits of a float64: exact, which pow and exp2 need not be."""
    return ((exponent + 1023) << 52).view(torch.float64)


def _pack_bits(codes_RC: Tensor, bits: int) -> Tensor:
    """Eight codes fill ``bits`` bytes; byte j holds the bits [8j, 8j + 8) of the little-endian stream."""
    rows, columns = codes_RC.shape
    groups = -(-columns // 8)
    padded = torch.nn.functional.pad(codes_RC, (0, groups * 8 - columns)).view(rows, groups, 8) & ((1 << bits) - 1)
    packed = torch.empty(rows, groups, bits, dtype=torch.uint8, device=codes_RC.device)
    for j in range(bits):
        byte = torch.zeros_like(padded[..., 0])
        for i in range(8):
            shift = i * bits - 8 * j
            if -bits < shift < 8:
                byte |= padded[..., i] << shift if shift >= 0 else padded[..., i] >> -shift
        packed[..., j] = (byte & 0xFF).to(torch.uint8)
    return packed.view(rows, groups * bits)[:, : -(-columns * bits // 8)].contiguous()


def _unpack_bits(packed: Tensor, bits: int, columns: int) -> Tensor:
    rows = packed.shape[0]
    groups = -(-columns // 8)
    padded = torch.nn.functional.pad(packed, (0, groups * bits - packed.shape[1])).view(rows, groups, bits).long()
    codes = torch.empty(rows, groups, 8, dtype=torch.int64, device=packed.device)
    sign = 1 << (bits - 1)
    for i in range(8):
        code = torch.zeros_like(codes[..., 0])
        for j in range(bits):
            shift = 8 * j - i * bits
            if -8 < shift < bits:
                code |= padded[..., j] << shift if shift >= 0 else padded[..., j] >> -shift
        codes[..., i] = ((code & (2 * sign - 1)) ^ sign) - sign
    return codes.view(rows, groups * 8)[:, :columns]
