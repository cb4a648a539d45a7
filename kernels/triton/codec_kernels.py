"""The GPU kernels in Triton: the arithmetic of kernels/reference on tiles, to the same bits.

A program works on a tile of T rows by C columns, in one of three ways:

    FLAT                      T stretches of C columns of the tensor as one long row (rows are whole blocks and bytes)
    blocks along columns       T stretches of C columns, numbered through all the rows
    blocks along rows          the T rows of one block (of one block of rows) by C columns

A tile holds whole blocks, so each value is read once. GRID is the format's, TO what is made (tiles.py). BLOCK_SIZE 0 is
one block for the tensor, for which ALONG_ROWS is false. A format with one exponent for the whole tensor is given the
tensor's largest value, which ``largest`` finds before: two readings of the tensor, as the code of a value depends on
all others.

Masks have one bit a value, as kernels/reference/stash.py defines them.

Suffixes: T tile rows, C tile columns, B blocks of a tile row, X values of a block; of a mask B bytes of a program, V
the eight values of a byte.
"""

import triton
import triton.language as tl

from dsq.kernels.triton.tiles import (
    MAGIC,
    MAGIC_BITS,
    NAN_EXPONENT,
    as_integers,
    as_words,
    load_float,
    load_words,
    magnitude,
    round_to_code,
    split_words,
    store_codes,
    store_float,
    uniform,
)


@triton.jit
def _tile(
    lines, rows, columns,
    BY_ROWS: tl.constexpr, FLAT: tl.constexpr, T: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """This program's tile: of each tile row, its row among the ``lines`` of the tensor, its first column, and whether
    there is such a row; for BY_ROWS also the number of its line of exponents, and its first column as a scalar."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    strips = (columns + C - 1) // C
    block, col0 = program // strips, program % strips * C
    # one return: Triton compiles what follows one, and wants the same types there
    if BY_ROWS:
        blocks = (rows + T - 1) // T
        in_outer_T = block % blocks * T + tl.arange(0, T)
        row_T = block // blocks * rows + in_outer_T
        col0_T = col0 + tl.zeros_like(row_T)
        valid_T = in_outer_T < rows
    else:
        stretch_T = program * T + tl.arange(0, T)
        row_T = tl.zeros_like(stretch_T) if FLAT else stretch_T // strips
        col0_T = stretch_T * C if FLAT else stretch_T % strips * C
        valid_T = stretch_T < strips if FLAT else row_T < lines
    return row_T, col0_T, valid_T, block, col0


@triton.jit
def _spread(v_TB, BLOCK_SIZE: tl.constexpr):
    """A value a block to the BLOCK_SIZE values of each block, along the columns."""
    v_TBX = tl.broadcast_to(v_TB[:, :, None], (v_TB.shape[0], v_TB.shape[1], BLOCK_SIZE))
    return tl.reshape(v_TBX, (v_TB.shape[0], v_TB.shape[1] * BLOCK_SIZE))


@triton.jit
def _exponent_of_tensor(scales_pointer, last, OF_TENSOR: tl.constexpr):
    """Return the stored exponent that a Grid takes as ``tensor``: the last of the scales."""
    if OF_TENSOR:
        return tl.load(scales_pointer + last).to(tl.int32)
    return 0


@triton.jit
def _made_exponent(largest_pointer, LOW: tl.constexpr, HIGH: tl.constexpr, PARTS: tl.constexpr):
    """The exponent to be stored for a tensor, of what ``largest`` wrote."""
    if LOW >= 0:
        exponent = tl.max(tl.load(largest_pointer + tl.arange(0, PARTS))) >> 23
        return tl.where(exponent == NAN_EXPONENT, exponent, tl.minimum(tl.maximum(exponent, LOW), HIGH))
    return 0


@triton.jit
def _largest_part(x_pointer, count, part, PARTS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr):
    """The bits of the largest magnitude among every PARTS-th stretch of E values, from stretch ``part`` on."""
    first = part.to(tl.int64) * E if WIDE else part * E
    largest_E = tl.zeros((E,), tl.int32)
    for begin in range(first, count, PARTS * E):
        at_E = begin + tl.arange(0, E)
        largest_E = tl.maximum(largest_E, magnitude(load_float(x_pointer + at_E, at_E < count)))
    return tl.max(largest_E)


@triton.jit
def largest(
    x_pointer, y_pointer, out_pointer, x_count, y_count,
    PARTS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """PARTS bits of magnitudes, of which the largest is that of ``x``; behind them those of ``y``, if it is given."""
    program = tl.program_id(0)
    x_pointer = as_integers(x_pointer)
    if y_pointer is not None:
        y_pointer = as_integers(y_pointer)
    if y_pointer is None:  # noqa: SIM114 (decided when it is compiled; the other one, on the device)
        part = _largest_part(x_pointer, x_count, program, PARTS, E, WIDE)
    elif program < PARTS:
        part = _largest_part(x_pointer, x_count, program, PARTS, E, WIDE)
    else:
        part = _largest_part(y_pointer, y_count, program - PARTS, PARTS, E, WIDE)
    tl.store(out_pointer + program, part)


@triton.jit(do_not_specialize=["lines", "rows", "width", "last", "seed", "last_2", "seed_2"])
def encode(
    x_pointer, largest_pointer, out_pointer, scales_pointer, seed_pointer,
    out_pointer_2, scales_pointer_2, seed_pointer_2,
    lines, rows, columns, width, last, row_words, seed: tl.int64, last_2, row_words_2, seed_2: tl.int64,
    TO: tl.constexpr, TO_2: tl.constexpr, BLOCK_SIZE_2: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALONG_ROWS: tl.constexpr, FLAT: tl.constexpr, STOCHASTIC: tl.constexpr, PARTS: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Round a tile of ``x``; if ``out_pointer_2`` is given, of blocks along rows, round it with blocks along columns
    too: the tile is read once. ``last`` is the place of the tensor's exponent among the scales."""
    row_T, col0_T, valid_T, block, col0 = _tile(lines, rows, columns, ALONG_ROWS, FLAT, T, C, WIDE)
    col_TC = col0_T[:, None] + tl.arange(0, C)[None, :]
    mask_TC = valid_T[:, None] & (col_TC < columns)
    x_TC = load_float(as_integers(x_pointer) + row_T[:, None] * columns + col_TC, mask_TC)
    tile = x_TC, mask_TC, col_TC, row_T, col0_T, valid_T, block, col0, rows, columns, width, largest_pointer
    _round_tile(
        *tile, out_pointer, scales_pointer, last, seed, seed_pointer, row_words,
        TO, BLOCK_SIZE, ALONG_ROWS, FLAT, STOCHASTIC, PARTS, T, C,
    )  # fmt: skip
    if out_pointer_2 is not None:
        _round_tile(
            *tile, out_pointer_2, scales_pointer_2, last_2, seed_2, seed_pointer_2, row_words_2,
            TO_2, BLOCK_SIZE_2, False, False, STOCHASTIC, PARTS, T, C,
        )  # fmt: skip


@triton.jit
def _round_tile(
    x_TC, mask_TC, col_TC, row_T, col0_T, valid_T, block, col0, rows, columns, width, largest_pointer,
    out_pointer, scales_pointer, last, seed, seed_pointer, row_words,
    TO: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALONG_ROWS: tl.constexpr, FLAT: tl.constexpr,
    STOCHASTIC: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Round a tile to values ``out``, or (pack) to codes ``out``, the tensor's exponent and scales. A seed on the
    device (``seed_pointer``) replaces ``seed``: a replayed CUDA graph keeps its numbers."""
    tensor = _made_exponent(largest_pointer, TO.low, TO.high, PARTS)
    if TO.low >= 0 and TO.pack:
        tl.store(scales_pointer + last, tensor.to(tl.uint8), tl.program_id(0) == 0)
    if BLOCK_SIZE == 0:
        scale_TC = tl.zeros_like(col_TC).to(tl.int32) + tensor
    elif ALONG_ROWS:
        scale_C = TO.grid.scale(tl.max(TO.grid.key(x_TC, TO.bits), axis=0), tensor, TO.bits)
        scale_TC = scale_C[None, :]
        if TO.pack:
            col_C = col0 + tl.arange(0, C)
            tl.store(scales_pointer + block * columns + col_C, scale_C.to(tl.uint8), col_C < columns)
    else:
        key_TBX = tl.reshape(TO.grid.key(x_TC, TO.bits), (T, C // BLOCK_SIZE, BLOCK_SIZE))
        scale_TB = TO.grid.scale(tl.max(key_TBX, axis=2), tensor, TO.bits)
        scale_TC = _spread(scale_TB, BLOCK_SIZE)
        if TO.pack:
            blocks = (columns + BLOCK_SIZE - 1) // BLOCK_SIZE
            at_TB = (col0_T // BLOCK_SIZE)[:, None] + tl.arange(0, C // BLOCK_SIZE)[None, :]
            mask_TB = valid_T[:, None] & (at_TB < blocks)
            tl.store(scales_pointer + row_T[:, None] * blocks + at_TB, scale_TB.to(tl.uint8), mask_TB)
    if seed_pointer is not None:
        seed = tl.load(seed_pointer)
    u_TC = uniform(seed, row_T, col0_T, width, FLAT, T, C) if STOCHASTIC else x_TC
    magic_TC = round_to_code(TO.grid.divide(x_TC, scale_TC, tensor, TO.bits), u_TC, TO.bits, TO.smallest, STOCHASTIC)
    if TO.pack:
        kept_TC = tl.where(TO.grid.is_nan(scale_TC, tensor, TO.bits), 0, (1 << TO.bits) - 1)
        code_TC = magic_TC.to(tl.int32, bitcast=True) & kept_TC
        store_codes(as_words(out_pointer, TO.word), code_TC, row_T, col0_T, valid_T, row_words, TO.bits, TO.word, T, C)
    else:
        y_TC = TO.grid.multiply(magic_TC - MAGIC, scale_TC, tensor, TO.bits)
        store_float(as_integers(out_pointer) + row_T[:, None] * columns + col_TC, y_TC, mask_TC)


@triton.jit(do_not_specialize=["lines", "rows", "last"])
def decode(
    codes_pointer, scales_pointer, y_pointer, lines, rows, columns, last, row_words,
    GRID: tl.constexpr, OF_TENSOR: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALONG_ROWS: tl.constexpr,
    FLAT: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Unpack a tile of values into ``y``."""
    row_T, col0_T, valid_T, block, _ = _tile(lines, rows, columns, ALONG_ROWS, FLAT, T, C, WIDE)
    col_TC = col0_T[:, None] + tl.arange(0, C)[None, :]
    mask_TC = valid_T[:, None] & (col_TC < columns)
    words = load_words(as_words(codes_pointer, WORD), row_T, col0_T, valid_T, row_words, BITS, WORD, T, C)
    tensor = _exponent_of_tensor(scales_pointer, last, OF_TENSOR)
    if BLOCK_SIZE == 0:
        scale_TC = tl.zeros_like(col_TC).to(tl.int32) + tl.load(scales_pointer).to(tl.int32)
    elif ALONG_ROWS:
        scale_TC = tl.load(scales_pointer + block * columns + col_TC, col_TC < columns, other=0).to(tl.int32)
    else:
        blocks = (columns + BLOCK_SIZE - 1) // BLOCK_SIZE
        at_TB = (col0_T // BLOCK_SIZE)[:, None] + tl.arange(0, C // BLOCK_SIZE)[None, :]
        mask_TB = valid_T[:, None] & (at_TB < blocks)
        scale_TB = tl.load(scales_pointer + row_T[:, None] * blocks + at_TB, mask_TB, other=0).to(tl.int32)
        scale_TC = _spread(scale_TB, BLOCK_SIZE)
    SIGN: tl.constexpr = 1 << (BITS - 1)
    code_TC = split_words(words, BITS, WORD, T, C)
    magic_TC = (code_TC ^ (MAGIC_BITS | SIGN)).to(tl.float32, bitcast=True)  # MAGIC + SIGN + the signed code
    y_TC = GRID.multiply(magic_TC - (MAGIC + SIGN), scale_TC, tensor, BITS)
    store_float(as_integers(y_pointer) + row_T[:, None] * columns + col_TC, y_TC, mask_TC)


# ---- masks


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
        x_BV = load_float(as_integers(x_pointer) + value_BV, mask_BV)
        open_BV = ((x_BV <= low) | (x_BV >= high)) == 0
        if not NAN_IS_OPEN:
            open_BV = open_BV & (x_BV == x_BV)
    bit_BV = (open_BV & mask_BV).to(tl.int32) << tl.arange(0, 8)[None, :]
    tl.store(bits_pointer + byte_B, tl.sum(bit_BV, axis=1).to(tl.uint8), byte_B * 8 < count)


@triton.jit
def _unpacked(bits_pointer, count, B: tl.constexpr, WIDE: tl.constexpr):
    """This program's bits, a bit of 0 or 1 a value, and the places of the values, as ``_places`` gives them."""
    byte_B, value_BV, mask_BV = _places(count, B, WIDE)
    bits_B = tl.load(bits_pointer + byte_B, byte_B * 8 < count, other=0).to(tl.int32)
    return (bits_B[:, None] >> tl.arange(0, 8)[None, :]) & 1, value_BV, mask_BV


@triton.jit
def unpack_mask(bits_pointer, y_pointer, count, B: tl.constexpr, WIDE: tl.constexpr):
    """Bits as floating values of 0 and 1."""
    bit_BV, value_BV, mask_BV = _unpacked(bits_pointer, count, B, WIDE)
    store_float(as_integers(y_pointer) + value_BV, bit_BV.to(tl.float32), mask_BV)


@triton.jit
def apply_mask(bits_pointer, x_pointer, y_pointer, count, B: tl.constexpr, WIDE: tl.constexpr):
    """Values where the bit is 1; else 0."""
    bit_BV, value_BV, mask_BV = _unpacked(bits_pointer, count, B, WIDE)
    x_BV = tl.load(as_integers(x_pointer) + value_BV, mask_BV, other=0)
    tl.store(as_integers(y_pointer) + value_BV, tl.where(bit_BV == 1, x_BV, 0), mask_BV)
