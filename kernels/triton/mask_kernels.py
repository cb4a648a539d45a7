"""Masks of one bit a value in Triton, as kernels/reference/masks.py defines them.

Suffixes: B bytes of bits a program, V the eight values of a byte.
"""

import triton
import triton.language as tl

from dsq.kernels.triton.tiles import load_float, store_float


@triton.jit
def _places(count, B: tl.constexpr, WIDE: tl.constexpr):
    """This program's bytes, the values of each, and which of these there are."""
    byte_B = tl.program_id(0) * B + tl.arange(0, B)
    if WIDE:
        byte_B = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    value_BV = byte_B[:, None] * 8 + tl.arange(0, 8)[None, :]
    return byte_B, value_BV, value_BV < count


@triton.jit
def pack_mask(
    x_pointer, bits_pointer, count, low, high,
    FLAGS: tl.constexpr, NAN_IS_OPEN: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The bits of floating values, or (FLAGS) of bytes of 0 or 1."""
    byte_B, value_BV, mask_BV = _places(count, B, WIDE)
    if FLAGS:
        open_BV = tl.load(x_pointer + value_BV, mask_BV, other=0) != 0
    else:
        x_BV = load_float(x_pointer + value_BV, mask_BV)
        open_BV = ((x_BV <= low) | (x_BV >= high)) == 0
        if not NAN_IS_OPEN:
            open_BV = open_BV & (x_BV == x_BV)
    bit_BV = (open_BV & mask_BV).to(tl.int32) << tl.arange(0, 8)[None, :]
    tl.store(bits_pointer + byte_B, tl.sum(bit_BV, axis=1).to(tl.uint8), byte_B * 8 < count)


@triton.jit
def unpack_mask(
    bits_pointer, y_pointer, count, closed, open,
    FLAGS: tl.constexpr, B: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Bits as ``closed`` and ``open``: floating values, or (FLAGS) bytes of 0 or 1."""
    byte_B, value_BV, mask_BV = _places(count, B, WIDE)
    bits_B = tl.load(bits_pointer + byte_B, byte_B * 8 < count, other=0).to(tl.int32)
    y_BV = tl.where(((bits_B[:, None] >> tl.arange(0, 8)[None, :]) & 1) == 1, open, closed)
    if FLAGS:
        tl.store(y_pointer + value_BV, (y_BV != 0).to(tl.uint8), mask_BV)
    else:
        store_float(y_pointer + value_BV, y_BV, mask_BV)


@triton.jit
def apply_mask(bits_pointer, x_pointer, y_pointer, count, B: tl.constexpr, WIDE: tl.constexpr):
    """Values, as integers of their width, where the bit is 1; else 0."""
    byte_B, value_BV, mask_BV = _places(count, B, WIDE)
    bits_B = tl.load(bits_pointer + byte_B, byte_B * 8 < count, other=0).to(tl.int32)
    x_BV = tl.load(x_pointer + value_BV, mask_BV, other=0)
    open_BV = ((bits_B[:, None] >> tl.arange(0, 8)[None, :]) & 1) == 1
    tl.store(y_pointer + value_BV, tl.where(open_BV, x_BV, 0), mask_BV)
