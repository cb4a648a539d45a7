"""The GPU kernels in Triton: the arithmetic of kernels/reference on tiles, to the same bits.

A program works on a tile of T rows by C columns, in one of three ways:

    FLAT                      T stretches of C columns of the tensor as one long row (rows are whole blocks and bytes)
    blocks along columns       T stretches of C columns, numbered through all the rows
    blocks along rows          the T rows of one block (of one block of rows) by C columns

A tile holds whole blocks, so each value is read once. SCALING is that of the format, and TARGET says what a tile is
rounded to (tiles.py). BLOCK_SIZE 0 is one block for the tensor, for which ALONG_ROWS is false. WIDE offsets have 64
bits. A format with one exponent for the whole tensor needs the tensor's largest value, which ``largest`` finds before.
The tensor is then read twice, as the code of a value depends on all others.

Masks have one bit a value, as kernels/reference/stash.py defines them.

Suffixes: T tile rows, C tile columns, B blocks of a tile row, X values of a block; of a mask B bytes of a program, V
the eight values of a byte.
"""

from typing import Any, NamedTuple

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


class Tile(NamedTuple):
    """The tile of a program. Fields that are no tensors are scalars."""

    row_T: Any  #: the row, numbered through all the rows of the tensor
    col0_T: Any  #: the first column
    valid_T: Any  #: whether the tensor has such a row
    col_TC: Any
    mask_TC: Any  #: whether the tensor has such a value
    columns: Any  #: of the tensor
    block: Any  #: with blocks along rows: the number of the block of rows
    col0: Any  #: with blocks along rows: the first column


class Output(NamedTuple):
    """Where a rounded tile is written. The arguments of ``encode`` bear these names, those of a second output with
    ``_2`` behind."""

    out_pointer: Any  #: of values, or of codes
    scales_pointer: Any
    exponent_place: Any  #: the place of the tensor's exponent among the scales
    row_words: Any  #: the number of words in which the codes of a row are stored
    seed: Any
    seed_pointer: Any  #: a seed on the device, which replaces ``seed``: a replayed CUDA graph keeps its numbers


@triton.jit
def _tile(
    lines, rows, columns,
    BY_ROWS: tl.constexpr, FLAT: tl.constexpr, T: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Return the Tile of this program, in a tensor of ``lines`` rows, of which ``rows`` at a time make a matrix."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    strips = (columns + C - 1) // C
    block, col0 = program // strips, program % strips * C
    # one return: Triton compiles the code after a return too, and requires the same types of every return
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
    col_TC = col0_T[:, None] + tl.arange(0, C)[None, :]
    mask_TC = valid_T[:, None] & (col_TC < columns)
    return Tile(row_T, col0_T, valid_T, col_TC, mask_TC, columns, block, col0)


@triton.jit
def _spread(v_TB, BLOCK_SIZE: tl.constexpr):
    """Repeat the value of each block BLOCK_SIZE times, along the columns."""
    v_TBX = tl.broadcast_to(v_TB[:, :, None], (v_TB.shape[0], v_TB.shape[1], BLOCK_SIZE))
    return tl.reshape(v_TBX, (v_TB.shape[0], v_TB.shape[1] * BLOCK_SIZE))


@triton.jit
def _exponent_of_tensor(scales_pointer, exponent_place, OF_TENSOR: tl.constexpr):
    """Return the exponent that ScalingFunctions take as ``tensor``, from its place among the scales."""
    if OF_TENSOR:
        return tl.load(scales_pointer + exponent_place).to(tl.int32)
    return 0


@triton.jit
def _exponent_to_store(largest_pointer, LOW: tl.constexpr, HIGH: tl.constexpr, PARTS: tl.constexpr):
    """Return the exponent to be stored for a tensor, from the parts that ``largest`` wrote."""
    if LOW >= 0:
        exponent = tl.max(tl.load(largest_pointer + tl.arange(0, PARTS))) >> 23
        return tl.where(exponent == NAN_EXPONENT, exponent, tl.minimum(tl.maximum(exponent, LOW), HIGH))
    return 0


@triton.jit
def _largest_part(x_pointer, count, part, PARTS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr):
    """Return the bits of the largest magnitude among every PARTS-th stretch of E values, from stretch ``part`` on."""
    start = part.to(tl.int64) * E if WIDE else part * E
    largest_E = tl.zeros((E,), tl.int32)
    for begin in range(start, count, PARTS * E):
        at_E = begin + tl.arange(0, E)
        largest_E = tl.maximum(largest_E, magnitude(load_float(x_pointer + at_E, at_E < count)))
    return tl.max(largest_E)


@triton.jit
def largest(
    x_pointer, y_pointer, out_pointer, x_count, y_count,
    PARTS: tl.constexpr, E: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Write the bits of PARTS magnitudes, the largest of which is the largest of ``x``; then those of ``y``, if any."""
    program = tl.program_id(0)
    x_pointer = as_integers(x_pointer)
    if y_pointer is not None:
        y_pointer = as_integers(y_pointer)
    if y_pointer is None:  # noqa: SIM114 (this is decided at compile time, the next condition on the device)
        part = _largest_part(x_pointer, x_count, program, PARTS, E, WIDE)
    elif program < PARTS:
        part = _largest_part(x_pointer, x_count, program, PARTS, E, WIDE)
    else:
        part = _largest_part(y_pointer, y_count, program - PARTS, PARTS, E, WIDE)
    tl.store(out_pointer + program, part)


@triton.jit(do_not_specialize=["lines", "rows", "width", "exponent_place", "seed", "exponent_place_2", "seed_2"])
def encode(
    x_pointer, largest_pointer, lines, rows, columns, width,
    out_pointer, scales_pointer, exponent_place, row_words, seed: tl.int64, seed_pointer,
    out_pointer_2, scales_pointer_2, exponent_place_2, row_words_2, seed_2: tl.int64, seed_pointer_2,
    TARGET: tl.constexpr, TARGET_2: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_SIZE_2: tl.constexpr,
    ALONG_ROWS: tl.constexpr, FLAT: tl.constexpr, STOCHASTIC: tl.constexpr, PARTS: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Round a tile of ``x`` to TARGET. If ``out_pointer_2`` is given, the tile has blocks along rows, and is rounded to
    TARGET_2 with blocks along columns too, from one reading. ``width`` is the length of a row that is not FLAT."""
    tile = _tile(lines, rows, columns, BY_ROWS=ALONG_ROWS, FLAT=FLAT, T=T, C=C, WIDE=WIDE)
    x_TC = load_float(as_integers(x_pointer) + tile.row_T[:, None] * columns + tile.col_TC, tile.mask_TC)
    output = Output(out_pointer, scales_pointer, exponent_place, row_words, seed, seed_pointer)
    _round_tile(
        x_TC, tile, width, largest_pointer, output, TARGET=TARGET, BLOCK_SIZE=BLOCK_SIZE,
        ALONG_ROWS=ALONG_ROWS, FLAT=FLAT, STOCHASTIC=STOCHASTIC, PARTS=PARTS, T=T, C=C,
    )  # fmt: skip
    if out_pointer_2 is not None:
        output_2 = Output(out_pointer_2, scales_pointer_2, exponent_place_2, row_words_2, seed_2, seed_pointer_2)
        _round_tile(
            x_TC, tile, width, largest_pointer, output_2, TARGET=TARGET_2, BLOCK_SIZE=BLOCK_SIZE_2,
            ALONG_ROWS=False, FLAT=False, STOCHASTIC=STOCHASTIC, PARTS=PARTS, T=T, C=C,
        )  # fmt: skip


@triton.jit
def _round_tile(
    x_TC, tile, width, largest_pointer, output,
    TARGET: tl.constexpr, BLOCK_SIZE: tl.constexpr, ALONG_ROWS: tl.constexpr, FLAT: tl.constexpr,
    STOCHASTIC: tl.constexpr, PARTS: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Round the values of a Tile and write them to an Output: as values, or as codes, scales and the tensor's
    exponent."""
    tensor = _exponent_to_store(largest_pointer, TARGET.low, TARGET.high, PARTS)
    if TARGET.low >= 0 and TARGET.pack:
        tl.store(output.scales_pointer + output.exponent_place, tensor.to(tl.uint8), tl.program_id(0) == 0)
    if BLOCK_SIZE == 0:
        scale_TC = tl.zeros_like(tile.col_TC).to(tl.int32) + tensor
    elif ALONG_ROWS:
        scale_C = TARGET.scaling.scale(tl.max(TARGET.scaling.key(x_TC, TARGET.bits), axis=0), tensor, TARGET.bits)
        scale_TC = scale_C[None, :]
        if TARGET.pack:
            col_C = tile.col0 + tl.arange(0, C)
            at_C = tile.block * tile.columns + col_C
            tl.store(output.scales_pointer + at_C, scale_C.to(tl.uint8), col_C < tile.columns)
    else:
        key_TBX = tl.reshape(TARGET.scaling.key(x_TC, TARGET.bits), (T, C // BLOCK_SIZE, BLOCK_SIZE))
        scale_TB = TARGET.scaling.scale(tl.max(key_TBX, axis=2), tensor, TARGET.bits)
        scale_TC = _spread(scale_TB, BLOCK_SIZE)
        if TARGET.pack:
            blocks = (tile.columns + BLOCK_SIZE - 1) // BLOCK_SIZE
            at_TB = (tile.col0_T // BLOCK_SIZE)[:, None] + tl.arange(0, C // BLOCK_SIZE)[None, :]
            mask_TB = tile.valid_T[:, None] & (at_TB < blocks)
            tl.store(output.scales_pointer + tile.row_T[:, None] * blocks + at_TB, scale_TB.to(tl.uint8), mask_TB)
    seed = output.seed
    if output.seed_pointer is not None:
        seed = tl.load(output.seed_pointer)
    u_TC = uniform(seed, tile.row_T, tile.col0_T, width, FLAT, T, C) if STOCHASTIC else x_TC
    t_TC = TARGET.scaling.divide(x_TC, scale_TC, tensor, TARGET.bits)
    magic_TC = round_to_code(t_TC, u_TC, TARGET.bits, TARGET.smallest, STOCHASTIC)
    if TARGET.pack:
        code_mask_TC = tl.where(TARGET.scaling.is_nan(scale_TC, tensor, TARGET.bits), 0, (1 << TARGET.bits) - 1)
        code_TC = magic_TC.to(tl.int32, bitcast=True) & code_mask_TC
        store_codes(
            as_words(output.out_pointer, TARGET.word), code_TC, tile.row_T, tile.col0_T, tile.valid_T, output.row_words,
            BITS=TARGET.bits, WORD=TARGET.word, T=T, C=C,
        )  # fmt: skip
    else:
        y_TC = TARGET.scaling.multiply(magic_TC - MAGIC, scale_TC, tensor, TARGET.bits)
        y_pointer = as_integers(output.out_pointer)
        store_float(y_pointer + tile.row_T[:, None] * tile.columns + tile.col_TC, y_TC, tile.mask_TC)


@triton.jit(do_not_specialize=["lines", "rows", "exponent_place"])
def decode(
    codes_pointer, scales_pointer, y_pointer, lines, rows, columns, exponent_place, row_words,
    SCALING: tl.constexpr, OF_TENSOR: tl.constexpr, BITS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    ALONG_ROWS: tl.constexpr, FLAT: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Unpack a tile of values into ``y``."""
    tile = _tile(lines, rows, columns, BY_ROWS=ALONG_ROWS, FLAT=FLAT, T=T, C=C, WIDE=WIDE)
    pointer = as_words(codes_pointer, WORD)
    words = load_words(pointer, tile.row_T, tile.col0_T, tile.valid_T, row_words, BITS=BITS, WORD=WORD, T=T, C=C)
    tensor = _exponent_of_tensor(scales_pointer, exponent_place, OF_TENSOR)
    if BLOCK_SIZE == 0:
        scale_TC = tl.zeros_like(tile.col_TC).to(tl.int32) + tl.load(scales_pointer).to(tl.int32)
    elif ALONG_ROWS:
        at_TC = tile.block * columns + tile.col_TC
        scale_TC = tl.load(scales_pointer + at_TC, tile.col_TC < columns, other=0).to(tl.int32)
    else:
        blocks = (columns + BLOCK_SIZE - 1) // BLOCK_SIZE
        at_TB = (tile.col0_T // BLOCK_SIZE)[:, None] + tl.arange(0, C // BLOCK_SIZE)[None, :]
        mask_TB = tile.valid_T[:, None] & (at_TB < blocks)
        scale_TB = tl.load(scales_pointer + tile.row_T[:, None] * blocks + at_TB, mask_TB, other=0).to(tl.int32)
        scale_TC = _spread(scale_TB, BLOCK_SIZE)
    SIGN: tl.constexpr = 1 << (BITS - 1)
    code_TC = split_words(words, BITS, WORD, T, C)
    magic_TC = (code_TC ^ (MAGIC_BITS | SIGN)).to(tl.float32, bitcast=True)  # MAGIC + SIGN + the signed code
    y_TC = SCALING.multiply(magic_TC - (MAGIC + SIGN), scale_TC, tensor, BITS)
    store_float(as_integers(y_pointer) + tile.row_T[:, None] * columns + tile.col_TC, y_TC, tile.mask_TC)


# ---- masks


@triton.jit
def _places(count, B: tl.constexpr, WIDE: tl.constexpr):
    """Return the bytes of this program, the values of each byte, and which of these values exist."""
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
    """Write the mask of floating values, or (FLAGS) of bytes of 0 or 1."""
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
    """Return the bit of each value of this program, 0 or 1, the places of the values, and which of these exist."""
    byte_B, value_BV, mask_BV = _places(count, B, WIDE)
    bits_B = tl.load(bits_pointer + byte_B, byte_B * 8 < count, other=0).to(tl.int32)
    return (bits_B[:, None] >> tl.arange(0, 8)[None, :]) & 1, value_BV, mask_BV


@triton.jit
def unpack_mask(bits_pointer, y_pointer, count, B: tl.constexpr, WIDE: tl.constexpr):
    """Write the bits as floating values of 0 and 1."""
    bit_BV, value_BV, mask_BV = _unpacked(bits_pointer, count, B, WIDE)
    store_float(as_integers(y_pointer) + value_BV, bit_BV.to(tl.float32), mask_BV)


@triton.jit
def apply_mask(bits_pointer, x_pointer, y_pointer, count, B: tl.constexpr, WIDE: tl.constexpr):
    """Write the value where the bit is 1, else 0."""
    bit_BV, value_BV, mask_BV = _unpacked(bits_pointer, count, B, WIDE)
    x_BV = tl.load(as_integers(x_pointer) + value_BV, mask_BV, other=0)
    tl.store(as_integers(y_pointer) + value_BV, tl.where(bit_BV == 1, x_BV, 0), mask_BV)
