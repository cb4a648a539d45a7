"""The pieces of the GPU kernels in Triton: floats in and out, rounding, random numbers, codes in words.

Subnormals are kept: Triton compiles float32 arithmetic without flush-to-zero (a test reads the PTX), exponents are
taken from the bits of the values, and a power of two is split into two factors that are both normal numbers. bfloat16
comes and goes as int16.

Suffixes: T tile rows, C tile columns, V codes of a word, W words of a tile row, G groups of 8 codes, Q counters.
"""

import triton
import triton.language as tl

from dsq.formats.fixed_point import BIAS as _BIAS
from dsq.kernels.reference.philox import BLOCK as _BLOCK
from dsq.kernels.reference.philox import LANES as _LANES
from dsq.kernels.reference.philox import ROUNDS as _ROUNDS

# a kernel reads a global only as a tl.constexpr
BIAS = tl.constexpr(_BIAS)
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
def magnitude(x):
    """The bits of |x|: they order as the values do, with infinity and then NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def times_power(value, unit, power):
    """value * unit * 2**power for |power| <= 252 and a ``unit`` of 1 or NaN, exact unless the product underflows."""
    half = power >> 1
    first = ((half + BIAS) << 23).to(tl.float32, bitcast=True)
    second = ((power - half + BIAS) << 23).to(tl.float32, bitcast=True)
    return value * (first * unit) * second


@triton.jit
def load_float(pointer, mask):
    """float32 values from a float32, float16 or (as int16) bfloat16 tensor; 0 where masked."""
    x = tl.load(pointer, mask, other=0)
    if x.dtype == tl.int16:
        return (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return x.to(tl.float32)


@triton.jit
def store_float(pointer, value, mask):
    """Store float32 ``value`` to a float32, float16 or (as int16) bfloat16 tensor, to nearest, ties to even."""
    if pointer.dtype.element_ty == tl.int16 and INTERPRETED:
        bits = value.to(tl.int32, bitcast=True)
        tl.store(pointer, ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16), mask)
    elif pointer.dtype.element_ty == tl.int16:
        tl.store(pointer, value.to(tl.bfloat16).to(tl.int16, bitcast=True), mask)
    else:
        tl.store(pointer, value.to(pointer.dtype.element_ty), mask)


@triton.jit
def uniform(seed, row_T, col0_T, width, FLAT: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """Uniform numbers (k + 1/2) / 2**16, those of the reference; a counter is computed once, for its eight values.
    Where the rows of ``width`` were laid end to end (FLAT), they are told apart again."""
    if FLAT:
        row_T = col0_T // width
        col0_T = col0_T % width
    c0_TQ = col0_T[:, None] // (BLOCK // LANES) + tl.arange(0, C * LANES // BLOCK)[None, :]
    zero_TQ = tl.zeros_like(c0_TQ).to(tl.int32)
    wide_TQ = zero_TQ + row_T[:, None]
    c2_TQ = (wide_TQ >> 32).to(tl.int32) if wide_TQ.dtype == tl.int64 else zero_TQ
    w0, w1, w2, w3 = tl.philox(seed, c0_TQ.to(tl.int32), wide_TQ.to(tl.int32), c2_TQ, zero_TQ, n_rounds=ROUNDS)
    # two 64-bit words move to the threads of a counter's eight values, each of which takes its own 16 bits there
    low_TQ = w0.to(tl.uint64) | (w1.to(tl.uint64) << 32)
    high_TQ = w2.to(tl.uint64) | (w3.to(tl.uint64) << 32)
    words = tl.permute(tl.reshape(tl.join(low_TQ, high_TQ), (T, C // BLOCK, LANES, 2)), (0, 1, 3, 2))
    words = tl.broadcast_to(words[:, :, :, None, :], (T, C // BLOCK, 2, 4, LANES))
    shift = (16 * tl.arange(0, 4)).to(tl.uint64)
    k_TC = tl.reshape((words >> shift[None, None, None, :, None]) & 0xFFFF, (T, C)).to(tl.int32)
    return ((k_TC << 7) | 0x3F800040).to(tl.float32, bitcast=True) - 1.0


@triton.jit
def round_to_code(t, u, BITS: tl.constexpr, SMALLEST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """MAGIC + the code of ``t``: subtract MAGIC for the code as a float, keep the low bits for the code's bits.
    ``u`` is uniform in (0, 1), for stochastic rounding."""
    t = tl.clamp(t, SMALLEST * 1.0, (1 << (BITS - 1)) - 1.0)
    if STOCHASTIC:
        size = tl.abs(t)
        whole = tl.floor(size)
        whole = tl.where(u < size - whole, whole + 1.0, whole)
        bits = whole.to(tl.int32, bitcast=True) | (t.to(tl.int32, bitcast=True) & -0x80000000)
        return bits.to(tl.float32, bitcast=True) + MAGIC
    return t + MAGIC


@triton.jit
def store_codes(
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
        tl.store(pointer + row_T[:, None] * row_words + at_TW, word_TW, mask_TW)
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
def load_words(
    pointer, row_T, col0_T, valid_T, row_words,
    BITS: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """The words of WORD bits that hold a tile's codes; or, where a word does not hold whole codes, for each code the
    three bytes from its first bit on."""
    if WORD % BITS == 0:
        V: tl.constexpr = WORD // BITS
        at_TW = (col0_T // V)[:, None] + tl.arange(0, C // V)[None, :]
        mask_TW = valid_T[:, None] & (at_TW < row_words)
        words = tl.load(pointer + row_T[:, None] * row_words + at_TW, mask_TW, other=0)
    else:
        at_TC = (col0_T // 8 * BITS)[:, None] + (BITS * tl.arange(0, C) // 8)[None, :]
        at_row_TC = pointer + row_T[:, None] * row_words + at_TC
        words = tl.zeros_like(at_TC).to(tl.int32)
        for byte in tl.static_range((BITS + 14) // 8):
            mask_TC = valid_T[:, None] & (at_TC + byte < row_words)
            words |= tl.load(at_row_TC + byte, mask_TC, other=0).to(tl.int32) << (8 * byte)
    return words


@triton.jit
def split_words(words, BITS: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """The codes in what ``load_words`` gave, not yet sign-extended."""
    if WORD % BITS == 0:
        V: tl.constexpr = WORD // BITS
        code_TWV = words.to(tl.int32)[:, :, None] >> (BITS * tl.arange(0, V))[None, None, :]
        code_TC = tl.reshape(code_TWV, (T, C))
    else:
        code_TC = words >> (BITS * tl.arange(0, C) % 8)[None, :]
    return code_TC & ((1 << BITS) - 1)
