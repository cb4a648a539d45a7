"""The oracle of quantize, pack and unpack, in float64, on any device. Other backends must give the same bits.

    t    = x / step                                        (formats.py: the step of each format's scale)
    code = round(clip(t, smallest code, largest code))
    x'   = code * step

``round`` is to nearest, ties to even; or stochastic: away from zero if a uniform number lies below the fraction of
``|t|``. A block that holds a NaN or an infinity has the step NaN, and codes of 0.

Shape suffixes: O outer, R rows, C columns (dsq.formats.Layout), B blocks; of a bitstream N bits, B bytes of a row and
b bits of a code.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from dsq.formats import Format, Layout
from dsq.kernels.reference.formats import scaling_of


def quantize(x: Tensor, fmt: Format, layout: Layout, seed: int | None, dtype: torch.dtype) -> Tensor:
    """Return ``x`` rounded to the grid, as ``dtype``: to nearest if ``seed`` is None, else stochastically."""
    codes_ORC, step_ORC, _ = _encode(x, fmt, layout, seed)
    return _decode(codes_ORC, step_ORC, dtype).view(x.shape)


def pack(x: Tensor, fmt: Format, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of ``x``: uint8 tensors of ``layout.code_shape`` and ``fmt.scale_shape``."""
    codes_ORC, _, scales = _encode(x, fmt, layout, seed)
    return pack_bits(codes_ORC.view(layout.outer * layout.rows, layout.columns), fmt.bits), scales


def unpack(codes: Tensor, scales: Tensor, fmt: Format, layout: Layout, dtype: torch.dtype) -> Tensor:
    """Return the values of packed ``codes`` as ``dtype``, of shape (outer, rows, columns)."""
    sign = 1 << (fmt.bits - 1)
    codes_ORC = (unpack_bits(codes, fmt.bits, layout.columns, torch.int64) ^ sign) - sign  # two's complement
    codes_ORC = codes_ORC.view(layout.outer, layout.rows, layout.columns)
    return _decode(codes_ORC, _spread(scaling_of(fmt).steps(scales, fmt, layout), fmt, layout), dtype)


def _spread(block_B: Tensor, fmt: Format, layout: Layout) -> Tensor:
    """Repeat the number of each block to a shape that broadcasts against (outer, rows, columns)."""
    if fmt.block_size == 0:
        return block_B.view(1, 1, 1)
    if layout.along_rows:
        return block_B.repeat_interleave(min(fmt.block_size, max(layout.rows, 1)), dim=1)[:, : layout.rows]
    value_RC = block_B.repeat_interleave(min(fmt.block_size, max(layout.columns, 1)), dim=1)[:, : layout.columns]
    return value_RC.reshape(layout.outer, layout.rows, layout.columns)


def _encode(x: Tensor, fmt: Format, layout: Layout, seed: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes (O, R, C) as int64, the step of each, and the stored scales."""
    scaling = scaling_of(fmt)
    x_ORC = x.to(torch.float32).to(torch.float64).reshape(layout.outer, layout.rows, layout.columns)
    scales = scaling.scales(x_ORC, fmt, layout)
    step_ORC = _spread(scaling.steps(scales, fmt, layout), fmt, layout)
    t = scaling.divide(x_ORC, step_ORC).clamp(fmt.smallest_code, fmt.largest_code)
    if seed is None:
        rounded = torch.round(t)
    else:
        u_RC = uniform(layout.outer * layout.rows, layout.columns, seed, t.device)
        rounded = torch.copysign(t.abs().floor() + (u_RC.view(t.shape) < t.abs().frac()), t)
    return torch.where(step_ORC.isnan(), 0.0, rounded).to(torch.int64), step_ORC, scales


def _decode(codes_ORC: Tensor, step_ORC: Tensor, dtype: torch.dtype) -> Tensor:
    return (codes_ORC * step_ORC).to(torch.float32).to(dtype)


# ---- random numbers of stochastic rounding: a counter-based generator, so that every backend draws the same ones
#
# Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2: the fewest
# rounds that pass BigCrush). The key is the 64-bit seed. A row's columns are taken 128 at a time. In such a block, the
# value of column 128 * block + 16 * j + lane uses the counter (16 * block + lane, row % 2**32, row // 2**32, 0), and of
# its four output words the low (j even) or high (j odd) half of word j // 2: sixteen counters side by side fill a
# 512-bit register and need no shuffling.

ROUNDS = 7
BLOCK = 128
LANES = 16
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def uniform(rows: int, columns: int, seed: int, device: torch.device, first_block: int = 0) -> Tensor:
    """Return uniform numbers ``(k + 1/2) / 2**16``, float64 (rows, columns), from a block of columns on."""
    blocks = -(-columns // BLOCK)
    counter_BL = torch.arange(first_block * LANES, (first_block + blocks) * LANES, device=device).view(1, blocks, LANES)
    row_R = torch.arange(rows, device=device).view(rows, 1, 1)
    words = philox((counter_BL, row_R & _MASK, row_R >> 32, torch.zeros_like(row_R)), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    half_RN = torch.stack([h.expand(rows, blocks, LANES) for h in halves], dim=2).reshape(rows, blocks * BLOCK)
    return (half_RN[:, :columns].double() + 0.5) / 65536


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Return four 32-bit words (in int64 tensors) for each 128-bit counter, which is four such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
        high0, low0 = _mulhilo(MULTIPLIERS[0], c0)
        high1, low1 = _mulhilo(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _MASK, (k1 + KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _mulhilo(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return the high and the low 32 bits of the product of two unsigned 32-bit numbers."""
    high = (a * (b >> 16) + ((a * (b & 0xFFFF)) >> 16)) >> 16
    return high, (a * b) & _MASK


# ---- bitstreams: little-endian, ``bits`` to a code, each row padded to a byte


def pack_bits(codes_RC: Tensor, bits: int) -> Tensor:
    """Return the low ``bits`` of integer codes (R, C) as bytes (R, ceil(C * bits / 8))."""
    codes_RC = codes_RC.to(torch.uint8 if bits <= 8 else torch.int16)
    bit_RN = (codes_RC[..., None] >> _places(bits, codes_RC) & 1).to(torch.uint8).flatten(1)
    bit_RB8 = pad(bit_RN, (0, -bit_RN.shape[1] % 8)).unflatten(1, (-1, 8))
    return torch.sum(bit_RB8 << _places(8, bit_RB8), -1, dtype=torch.uint8)


def unpack_bits(packed_RB: Tensor, bits: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Return the codes (R, columns) of such bytes, unsigned, in an integer ``dtype`` that holds them."""
    bit_RN = (packed_RB[..., None] >> _places(8, packed_RB) & 1).flatten(1)[:, : columns * bits]
    bit_RCb = bit_RN.unflatten(1, (columns, bits)).to(dtype)
    return torch.sum(bit_RCb << _places(bits, bit_RCb), -1, dtype=dtype)


def _places(count: int, x: Tensor) -> Tensor:
    """Return the numbers from 0 to ``count`` - 1, in the dtype and on the device of ``x``."""
    return torch.arange(count, dtype=x.dtype, device=x.device)
