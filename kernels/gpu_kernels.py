"""The GPU kernels in Triton: the arithmetic of kernels.reference on tiles, to the same bits.

A program works on a tile of T rows by C columns, in one of two ways:

    boxes along columns   T stretches of C columns, numbered through all the rows (so short rows fill a tile too)
    boxes along rows      the T rows of one box (of one block of rows) by C columns

so that a box lies inside a tile (INSIDE) and each value is read once; boxes that fit no tile have their exponents made
first, by ``box_exponents``, and every value looks its own up.

Nothing here flushes subnormals, whatever the compiler's flags: exponents are taken from the bits of the values, and
a power of two is split into two factors that are both normal numbers. bfloat16 comes and goes as int16, widened and
rounded by integer arithmetic.

Suffixes: T tile rows, C tile columns, B boxes of a tile row, V codes of a word, Q counters of a tile row.
"""

import triton
import triton.language as tl

from .grid import BIAS as _BIAS
from .grid import NAN_EXPONENT as _NAN_EXPONENT
from .philox import BLOCK as _BLOCK
from .philox import LANES as _LANES
from .philox import ROUNDS as _ROUNDS

BIAS = tl.constexpr(_BIAS)
NAN_EXPONENT = tl.constexpr(_NAN_EXPONENT)
BLOCK = tl.constexpr(_BLOCK)
LANES = tl.constexpr(_LANES)
ROUNDS = tl.constexpr(_ROUNDS)
#: 1.5 * 2**23: a float32 of at most 22 bits added to it is rounded to a whole number, ties to even, whose two's
#: complement is then the low bits of the sum
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
#: Triton's interpreter truncates where it should round to bfloat16
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _tile(
    outer, rows, columns,
    BY_ROWS: tl.constexpr, FLAT: tl.constexpr, T: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """This program's tile: of each tile row the row of the matrix, its first column, and whether there is such a row;
    and the number of its row of exponents (BY_ROWS only)."""
    program = tl.program_id(0)
    if WIDE:
        program = program.to(tl.int64)
    strips = (columns + C - 1) // C
    if FLAT:
        stretch_T = program * T + tl.arange(0, T)
        return tl.zeros_like(stretch_T), stretch_T * C, stretch_T < strips, program
    if BY_ROWS:
        boxes = (rows + T - 1) // T
        box = program // strips
        row_T = box % boxes * T + tl.arange(0, T)
        return box // boxes * rows + row_T, program % strips * C + tl.zeros_like(row_T), row_T < rows, box
    stretch_T = program * T + tl.arange(0, T)
    row_T = stretch_T // strips
    return row_T, stretch_T % strips * C, row_T < outer * rows, program


@triton.jit
def _load_float(pointer, mask):
    """float32 values from a float32, float16 or (as int16) bfloat16 tensor; 0 where masked."""
    x = tl.load(pointer, mask, other=0)
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def _store_float(pointer, value, mask):
    """Store float32 ``value`` to a float32, float16 or (as int16) bfloat16 tensor, to nearest, ties to even."""
    if pointer.dtype.element_ty == tl.int16 and INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        tl.store(pointer, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16), mask)
    elif pointer.dtype.element_ty == tl.int16:
        tl.store(pointer, value.to(tl.bfloat16).to(tl.int16, bitcast=True), mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask)


@triton.jit
def _magnitude(x):
    """The bits of |x|: they order as the values do, with infinity and then NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _scale(value, unit, power):
    """value * unit * 2**power for |power| <= 252 and a ``unit`` of 1 or NaN, exact unless the product underflows."""
    half = power >> 1
    first = ((half + BIAS) << 23).to(tl.float32, bitcast=True)
    second = ((power - half + BIAS) << 23).to(tl.float32, bitcast=True)
    return value * (first * unit) * second


@triton.jit
def _spread(v_TB, BOX: tl.constexpr):
    """A value a box to the BOX values of each box, along the columns."""
    v_TBX = tl.broadcast_to(v_TB[:, :, None], (v_TB.shape[0], v_TB.shape[1], BOX))
    return tl.reshape(v_TBX, (v_TB.shape[0], v_TB.shape[1] * BOX))


@triton.jit
def _gather_exponents(pointer, row_T, col_TC, mask_TC, rows, columns, BOX: tl.constexpr, ALONG_ROWS: tl.constexpr):
    """The stored exponent of each value, looked up one by one."""
    if BOX == 0:
        return tl.zeros_like(col_TC).to(tl.int32) + tl.load(pointer).to(tl.int32)
    if ALONG_ROWS:
        boxes = (rows + BOX - 1) // BOX
        box_T = row_T // rows * boxes + row_T % rows // BOX
        return tl.load(pointer + box_T[:, None] * columns + col_TC, mask_TC, other=0).to(tl.int32)
    boxes = (columns + BOX - 1) // BOX
    return tl.load(pointer + row_T[:, None] * boxes + col_TC // BOX, mask_TC, other=0).to(tl.int32)


@triton.jit
def _uniform(seed, row_T, col0_T, width, FLAT: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The uniform numbers (k + 1/2) / 2**16 of kernels.philox: each counter is computed once, for its eight values.
    Where the rows of ``width`` were laid end to end (FLAT), they are told apart again."""
    if FLAT:
        row_T = col0_T // width
        col0_T = col0_T % width
    c0_TQ = col0_T[:, None] // (BLOCK // LANES) + tl.arange(0, C * LANES // BLOCK)[None, :]
    zero_TQ = tl.zeros_like(c0_TQ).to(tl.int32)
    wide_TQ = zero_TQ + row_T[:, None]
    c2_TQ = (wide_TQ >> 32).to(tl.int32) if wide_TQ.dtype == tl.int64 else zero_TQ
    w0, w1, w2, w3 = tl.philox(seed, c0_TQ.to(tl.int32), wide_TQ.to(tl.int32), c2_TQ, zero_TQ, n_rounds=ROUNDS)
    words = tl.join(tl.join(w0, w2), tl.join(w1, w3))
    k = tl.join(words & 0xFFFF, words >> 16)
    k = tl.permute(tl.reshape(k, (T, C // BLOCK, LANES, BLOCK // LANES)), (0, 1, 3, 2))
    k_TC = tl.reshape(k, (T, C)).to(tl.int32)
    return ((k_TC << 7) | 0x3F800040).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def _round(t, uniform, BITS: tl.constexpr, STOCHASTIC: tl.constexpr):
    """MAGIC + the code of ``t``: subtract MAGIC for the code as a float, keep the low bits for the code's bits."""
    LARGEST: tl.constexpr = (1 << (BITS - 1)) - 1.0
    if STOCHASTIC:
        size = tl.minimum(tl.abs(t), LARGEST)
        whole = tl.floor(size)
        whole = tl.where(uniform < size - whole, whole + 1.0, whole)
        bits = whole.to(tl.int32, bitcast=True) | (t.to(tl.int32, bitcast=True) & -0x80000000)
        return bits.to(tl.float32, bitcast=True) + MAGIC
    return tl.clamp(t, -LARGEST, LARGEST) + MAGIC


@triton.jit
def _store_codes(
    pointer, code_TC, row_T, col0_T, valid_T, row_words,
    BITS: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Pack codes (masked to BITS) into little-endian words of WORD bits; ``row_words`` is a row's number of them."""
    if WORD % BITS == 0:
        V: tl.constexpr = WORD // BITS
        W: tl.constexpr = C // V
        word_TW = tl.sum(tl.reshape(code_TC, (T, W, V)) << (BITS * tl.arange(0, V))[None, None, :], axis=2)
        at_TW = (col0_T // V)[:, None] + tl.arange(0, W)[None, :]
        mask_TW = valid_T[:, None] & (at_TW < row_words)
        word_TW = word_TW.to(pointer.dtype.element_ty)
        tl.store(pointer + row_T.to(at_TW.dtype)[:, None] * row_words + at_TW, word_TW, mask_TW)
    else:  # eight codes make BITS bytes
        code_TGV = tl.reshape(code_TC, (T, C // 8, 8))
        at_TG = (col0_T // 8 * BITS)[:, None] + (BITS * tl.arange(0, C // 8))[None, :]
        for byte in tl.static_range(BITS):
            shift_V = BITS * tl.arange(0, 8) - 8 * byte
            left_V = tl.minimum(tl.maximum(shift_V, 0), 8)
            right_V = tl.minimum(tl.maximum(-shift_V, 0), 31)
            part_TGV = (code_TGV << left_V[None, None, :] >> right_V[None, None, :]) & 0xFF
            mask_TG = valid_T[:, None] & (at_TG + byte < row_words)
            byte_TG = tl.sum(part_TGV, axis=2).to(tl.uint8)
            tl.store(pointer + row_T[:, None] * row_words + at_TG + byte, byte_TG, mask_TG)


@triton.jit
def _load_codes(
    pointer, row_T, col0_T, valid_T, row_words,
    BITS: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The codes of a tile, not yet sign-extended."""
    if WORD % BITS == 0:
        V: tl.constexpr = WORD // BITS
        W: tl.constexpr = C // V
        at_TW = (col0_T // V)[:, None] + tl.arange(0, W)[None, :]
        mask_TW = valid_T[:, None] & (at_TW < row_words)
        word_TW = tl.load(pointer + row_T[:, None] * row_words + at_TW, mask_TW, other=0).to(tl.int32)
        code_TWV = word_TW[:, :, None] >> (BITS * tl.arange(0, V))[None, None, :]
        code_TC = tl.reshape(code_TWV, (T, C))
    else:
        bit_C = BITS * tl.arange(0, C)
        at_TC = (col0_T // 8 * BITS)[:, None] + (bit_C // 8)[None, :]
        at_row_TC = pointer + row_T[:, None] * row_words + at_TC
        code_TC = tl.zeros_like(at_TC).to(tl.int32)
        for byte in tl.static_range((BITS + 14) // 8):
            mask_TC = valid_T[:, None] & (at_TC + byte < row_words)
            code_TC |= tl.load(at_row_TC + byte, mask_TC, other=0).to(tl.int32) << (8 * byte)
        code_TC = code_TC >> (bit_C % 8)[None, :]
    return code_TC & ((1 << BITS) - 1)


@triton.jit
def encode(
    x_pointer, y_pointer, codes_pointer, exponents_pointer, seed: tl.int64, outer, rows, columns, width, row_words,
    BITS: tl.constexpr, BOX: tl.constexpr, ALONG_ROWS: tl.constexpr, INSIDE: tl.constexpr, FLAT: tl.constexpr,
    STOCHASTIC: tl.constexpr, PACK: tl.constexpr, WORD: tl.constexpr,
    T: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantise a tile of ``x``: into ``y``, or (PACK) into codes and, if its boxes lie INSIDE, exponents."""
    row_T, col0_T, valid_T, box = _tile(outer, rows, columns, ALONG_ROWS and INSIDE, FLAT, T, C, WIDE)
    col_TC = col0_T[:, None] + tl.arange(0, C)[None, :]
    mask_TC = valid_T[:, None] & (col_TC < columns)
    x_TC = _load_float(x_pointer + row_T[:, None] * columns + col_TC, mask_TC)
    if not INSIDE:
        stored_TC = _gather_exponents(exponents_pointer, row_T, col_TC, mask_TC, rows, columns, BOX, ALONG_ROWS)
    elif ALONG_ROWS:
        stored_C = tl.max(_magnitude(x_TC), axis=0) >> 23
        stored_TC = stored_C[None, :]
        if PACK:
            col_C = tl.max(col0_T, axis=0) + tl.arange(0, C)
            tl.store(exponents_pointer + box * columns + col_C, stored_C.to(tl.uint8), col_C < columns)
    else:
        stored_TB = tl.max(tl.reshape(_magnitude(x_TC), (T, C // BOX, BOX)), axis=2) >> 23
        stored_TC = _spread(stored_TB, BOX)
        if PACK:
            boxes = (columns + BOX - 1) // BOX
            at_TB = (col0_T // BOX)[:, None] + tl.arange(0, C // BOX)[None, :]
            mask_TB = valid_T[:, None] & (at_TB < boxes)
            tl.store(exponents_pointer + row_T[:, None] * boxes + at_TB, stored_TB.to(tl.uint8), mask_TB)
    power_TC = BITS - 2 + BIAS - stored_TC
    uniform_TC = _uniform(seed, row_T, col0_T, width, FLAT, T, C) if STOCHASTIC else x_TC
    magic_TC = _round(_scale(x_TC, 1.0, power_TC), uniform_TC, BITS, STOCHASTIC)
    if PACK:
        code_TC = magic_TC.to(tl.int32, bitcast=True) & tl.where(stored_TC == NAN_EXPONENT, 0, (1 << BITS) - 1)
        _store_codes(codes_pointer, code_TC, row_T, col0_T, valid_T, row_words, BITS, WORD, T, C)
    else:
        _store_values(y_pointer, magic_TC - MAGIC, stored_TC, row_T, col_TC, mask_TC, columns, BITS)


@triton.jit
def _store_values(pointer, code_TC, stored_TC, row_T, col_TC, mask_TC, columns, BITS: tl.constexpr):
    """Store ``code_TC``, whole numbers in float32, as the values they stand for."""
    unit_TC = tl.where(stored_TC == NAN_EXPONENT, float("nan"), 1.0)
    value_TC = _scale(code_TC, unit_TC, stored_TC - (BIAS + BITS - 2))
    _store_float(pointer + row_T[:, None] * columns + col_TC, value_TC, mask_TC)


@triton.jit
def decode(
    codes_pointer, exponents_pointer, y_pointer, outer, rows, columns, row_words,
    BITS: tl.constexpr, BOX: tl.constexpr, ALONG_ROWS: tl.constexpr, INSIDE: tl.constexpr, FLAT: tl.constexpr,
    WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Unpack a tile of values into ``y``."""
    row_T, col0_T, valid_T, box = _tile(outer, rows, columns, ALONG_ROWS and INSIDE, FLAT, T, C, WIDE)
    col_TC = col0_T[:, None] + tl.arange(0, C)[None, :]
    mask_TC = valid_T[:, None] & (col_TC < columns)
    code_TC = _load_codes(codes_pointer, row_T, col0_T, valid_T, row_words, BITS, WORD, T, C)
    if not INSIDE:
        stored_TC = _gather_exponents(exponents_pointer, row_T, col_TC, mask_TC, rows, columns, BOX, ALONG_ROWS)
    elif ALONG_ROWS:
        stored_TC = tl.load(exponents_pointer + box * columns + col_TC, col_TC < columns, other=0).to(tl.int32)
    else:
        boxes = (columns + BOX - 1) // BOX
        at_TB = (col0_T // BOX)[:, None] + tl.arange(0, C // BOX)[None, :]
        mask_TB = valid_T[:, None] & (at_TB < boxes)
        stored_TB = tl.load(exponents_pointer + row_T[:, None] * boxes + at_TB, mask_TB, other=0).to(tl.int32)
        stored_TC = _spread(stored_TB, BOX)
    SIGN: tl.constexpr = 1 << (BITS - 1)
    magic_TC = (code_TC ^ (MAGIC_BITS | SIGN)).to(tl.float32, bitcast=True)  # MAGIC + SIGN + the signed code
    _store_values(y_pointer, magic_TC - (MAGIC + SIGN), stored_TC, row_T, col_TC, mask_TC, columns, BITS)


@triton.jit
def box_exponents(
    x_pointer, exponents_pointer, outer, rows, columns,
    BOX: tl.constexpr, ALONG_ROWS: tl.constexpr, P: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The stored exponents of P boxes a program, in their order in memory; boxes of any length."""
    box_P = tl.program_id(0) * P + tl.arange(0, P)
    if WIDE:
        box_P = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    if ALONG_ROWS:
        boxes = (rows + BOX - 1) // BOX
        line_P, col_P = box_P // columns, box_P % columns
        row_P = line_P % boxes * BOX
        first_P = (line_P // boxes * rows + row_P) * columns + col_P
        step, left_P, valid_P = columns, rows - row_P, line_P < outer * boxes
    else:
        boxes = (columns + BOX - 1) // BOX
        col_P = box_P % boxes * BOX
        first_P = box_P // boxes * columns + col_P
        step, left_P, valid_P = 1, columns - col_P, box_P < outer * rows * boxes
    largest_P = tl.zeros((P,), tl.int32)
    for i in range(BOX):
        x_P = _load_float(x_pointer + first_P + i * step, valid_P & (i < left_P))
        largest_P = tl.maximum(largest_P, _magnitude(x_P))
    tl.store(exponents_pointer + box_P, (largest_P >> 23).to(tl.uint8), valid_P)
