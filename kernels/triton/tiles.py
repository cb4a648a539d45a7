"""The pieces of the GPU kernels in Triton: floats in and out, rounding, random numbers, codes in words, formats.

Subnormals are exact. Triton compiles float32 arithmetic without flush-to-zero (a test reads the PTX), exponents are
taken from the bits of the values, and a power of two is split into two factors that are both normal numbers. bfloat16
is loaded and stored as int16.

Shape suffixes: T tile rows, C tile columns, V codes of a word, W words of a tile row, G groups of 8 codes, Q counters.
"""

from typing import NamedTuple

import triton
import triton.language as tl
from triton.runtime.jit import JITFunction

from dsq.formats import BIAS as _BIAS
from dsq.formats import SignedNVInt as _SignedNVInt
from dsq.kernels.reference import codec as _codec
from dsq.kernels.reference import formats as _formats

# a kernel reads a global only as a tl.constexpr
BIAS = tl.constexpr(_BIAS)
BLOCK = tl.constexpr(_codec.BLOCK)
LANES = tl.constexpr(_codec.LANES)
ROUNDS = tl.constexpr(_codec.ROUNDS)
#: 1.5 * 2**23: a float32 of at most 22 bits added to it is rounded to a whole number, ties to even, whose two's
#: complement is then the low bits of the sum
MAGIC = tl.constexpr(12582912.0)
MAGIC_BITS = tl.constexpr(0x4B400000)
#: Triton's interpreter truncates where it should round to bfloat16
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def magnitude(x):
    """Return the bits of |x|, which order as the values do, with infinity and then NaN above all."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def times_power(value, unit, power):
    """Return value * unit * 2**power, exact unless it underflows, for |power| <= 252 and a ``unit`` of 1 or NaN."""
    half = power >> 1
    factor_1 = ((half + BIAS) << 23).to(tl.float32, bitcast=True)
    factor_2 = ((power - half + BIAS) << 23).to(tl.float32, bitcast=True)
    return value * (factor_1 * unit) * factor_2


@triton.jit
def as_integers(pointer):
    """Return a pointer to bfloat16 as one to int16, and any other as it is."""
    if pointer.dtype.element_ty == tl.bfloat16:
        pointer = pointer.to(tl.pointer_type(tl.int16), bitcast=True)
    return pointer


@triton.jit
def as_words(pointer, WORD: tl.constexpr):
    """Return a pointer to bytes as one to words of WORD bits."""
    if WORD == 32:
        pointer = pointer.to(tl.pointer_type(tl.int32), bitcast=True)
    elif WORD == 16:
        pointer = pointer.to(tl.pointer_type(tl.int16), bitcast=True)
    return pointer


@triton.jit
def load_float(pointer, mask):
    """Load float32 values from a float32, float16 or (as int16) bfloat16 tensor; 0 where masked."""
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
    """Return the uniform numbers (k + 1/2) / 2**16 of the reference. Each counter is computed once, for its eight
    values. If the tensor is one long row (FLAT), rows and columns are counted in the rows of ``width``."""
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
    """Return MAGIC + the code of ``t``: minus MAGIC it is the code as a float, and its low bits are the code's bits.
    ``u`` is uniform in (0, 1), for stochastic rounding."""
    t = tl.clamp(t, SMALLEST * 1.0, (1 << (BITS - 1)) - 1.0)
    if STOCHASTIC:
        size = tl.abs(t)
        integer = tl.floor(size)
        integer = tl.where(u < size - integer, integer + 1.0, integer)
        bits = integer.to(tl.int32, bitcast=True) | (t.to(tl.int32, bitcast=True) & -0x80000000)
        return bits.to(tl.float32, bitcast=True) + MAGIC
    return t + MAGIC


@triton.jit
def store_codes(
    pointer, code_TC, row_T, col0_T, valid_T, row_words,
    BITS: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Pack codes (masked to BITS) into little-endian words of WORD bits, ``row_words`` of them a row.

    If a word does not hold whole codes, 32 codes make BITS words, or eight codes make BITS bytes. P is the next power
    of two, and the words beyond BITS are not stored. Triton lays a warp's threads along the first of two axes whose
    addresses are equally scattered, so the groups come before the rows."""
    if WORD % BITS == 0:
        V: tl.constexpr = WORD // BITS
        W: tl.constexpr = C // V
        word_TW = tl.sum(tl.reshape(code_TC, (T, W, V)) << (BITS * tl.arange(0, V))[None, None, :], axis=2)
        at_TW = (col0_T // V)[:, None] + tl.arange(0, W)[None, :]
        mask_TW = valid_T[:, None] & (at_TW < row_words)
        word_TW = word_TW.to(pointer.dtype.element_ty)
        tl.store(pointer + row_T[:, None] * row_words + at_TW, word_TW, mask_TW)
    else:
        GROUP: tl.constexpr = 32 if WORD == 32 else 8
        P: tl.constexpr = 8 if BITS <= 8 else 16
        at_P = tl.arange(0, P)[None, None, :]
        if WORD == 32:
            word_GTP = _words_of_32(code_TC, BITS, T, C)
        else:
            HALF: tl.constexpr = tl.int32 if BITS <= 7 else tl.int64
            four_TGHF = tl.reshape(code_TC, (T, C // 8, 2, 4)).to(HALF) << (BITS * tl.arange(0, 4))[None, None, None, :]
            low_TG, high_TG = tl.split(tl.sum(four_TGHF, axis=3))
            right_P, left_P = tl.maximum(8 * at_P - 4 * BITS, 0), tl.maximum(4 * BITS - 8 * at_P, 0)
            low_GTP = tl.trans(low_TG)[:, :, None] >> tl.minimum(8 * at_P, HALF.primitive_bitwidth - 1)
            word_GTP = low_GTP | (tl.trans(high_TG)[:, :, None] >> right_P << left_P)
        at_GTP = (BITS * tl.arange(0, C // GROUP))[:, None, None] + (col0_T // GROUP * BITS)[None, :, None] + at_P
        mask_GTP = valid_T[None, :, None] & (at_P < BITS) & (at_GTP < row_words)
        word_GTP = word_GTP.to(pointer.dtype.element_ty)
        tl.store(pointer + row_T[None, :, None] * row_words + at_GTP, word_GTP, mask_GTP)


@triton.jit
def _words_of_32(code_TC, BITS: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """Return the BITS words of each 32 codes of 3 to 7 bits, and zeros up to eight: (C / 32, T, 8)."""
    four_TQ = tl.sum(tl.reshape(code_TC, (T, C // 4, 4)) << (BITS * tl.arange(0, 4))[None, None, :], axis=2)
    low_TE, high_TE = tl.split(tl.reshape(four_TQ, (T, C // 8, 2)))
    eight_TE = low_TE.to(tl.int64) | (high_TE.to(tl.int64) << (4 * BITS))
    even_TGH, odd_TGH = tl.split(tl.reshape(eight_TE, (T, C // 32, 2, 2)))
    e0_TG, e2_TG = tl.split(even_TGH)
    e1_TG, e3_TG = tl.split(odd_TGH)
    eights = tl.trans(e0_TG), tl.trans(e1_TG), tl.trans(e2_TG), tl.trans(e3_TG)
    # the last axis that is joined is the lowest bit of a word's place
    even = tl.join(
        tl.join(_word(eights, 0, BITS), _word(eights, 4, BITS)), tl.join(_word(eights, 2, BITS), _word(eights, 6, BITS))
    )
    odd = tl.join(
        tl.join(_word(eights, 1, BITS), _word(eights, 5, BITS)), tl.join(_word(eights, 3, BITS), _word(eights, 7, BITS))
    )
    return tl.reshape(tl.join(even, odd), (C // 32, T, 8))


@triton.jit
def _word(eights, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Return the word of this place, from the 8 * BITS bits of each of four ``eights``."""
    word = tl.zeros_like(eights[0])
    for i in tl.static_range(4):
        word |= _shift_left(eights[i], 8 * BITS * i - 32 * PLACE)
    return word.to(tl.int32)


@triton.jit
def _shift_left(x, COUNT: tl.constexpr):
    """Shift ``x`` to the left by any COUNT of bits; to the right if COUNT is negative."""
    if COUNT > 63 or COUNT < -63:
        y = tl.zeros_like(x)
    elif COUNT >= 0:
        y = x << COUNT
    else:
        y = x >> -COUNT
    return y


@triton.jit
def load_words(
    pointer, row_T, col0_T, valid_T, row_words,
    BITS: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Load the words from which ``split_words`` takes the codes of a tile. They are words of WORD bits that hold whole
    codes, or the BITS words of each 32 codes (G, T, P) as ``store_codes`` writes them, or for each code the two or
    three bytes from its first bit on."""
    if WORD % BITS == 0:
        V: tl.constexpr = WORD // BITS
        at_TW = (col0_T // V)[:, None] + tl.arange(0, C // V)[None, :]
        mask_TW = valid_T[:, None] & (at_TW < row_words)
        words = tl.load(pointer + row_T[:, None] * row_words + at_TW, mask_TW, other=0)
    elif WORD == 32:
        at_P = tl.arange(0, 8)[None, None, :]
        at_GTP = (BITS * tl.arange(0, C // 32))[:, None, None] + (col0_T // 32 * BITS)[None, :, None] + at_P
        mask_GTP = valid_T[None, :, None] & (at_P < BITS) & (at_GTP < row_words)
        words = tl.load(pointer + row_T[None, :, None] * row_words + at_GTP, mask_GTP, other=0)
    else:
        at_CT = (BITS * tl.arange(0, C) // 8)[:, None] + (col0_T // 8 * BITS)[None, :]
        words_CT = tl.zeros_like(at_CT).to(tl.int32)
        for byte in tl.static_range((BITS + 14) // 8):
            mask_CT = valid_T[None, :] & (at_CT + byte < row_words)
            byte_CT = tl.load(pointer + row_T[None, :] * row_words + at_CT + byte, mask_CT, other=0)
            words_CT |= byte_CT.to(tl.int32) << (8 * byte)
        words = tl.trans(words_CT)
    return words


@triton.jit
def split_words(words, BITS: tl.constexpr, WORD: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """Return the codes in the words of ``load_words``, not yet sign-extended."""
    if WORD % BITS == 0:
        V: tl.constexpr = WORD // BITS
        code_TWV = words.to(tl.int32)[:, :, None] >> (BITS * tl.arange(0, V))[None, None, :]
        code_TC = tl.reshape(code_TWV, (T, C))
    elif WORD == 32:
        code_TC = _codes_of_words(words, BITS, T, C)
    else:
        code_TC = words >> (BITS * tl.arange(0, C) % 8)[None, :]
    return code_TC & ((1 << BITS) - 1)


@triton.jit
def _codes_of_words(words_GTP, BITS: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """Return the codes in the words of ``_words_of_32``, with other bits above them."""
    wide_GTP = words_GTP.to(tl.uint32, bitcast=True).to(tl.int64)
    even, odd = tl.split(tl.reshape(wide_GTP, (C // 32, T, 2, 2, 2)))
    even_0, even_2 = tl.split(even)
    odd_1, odd_3 = tl.split(odd)
    w0, w4 = tl.split(even_0)
    w2, w6 = tl.split(even_2)
    w1, w5 = tl.split(odd_1)
    w3, w7 = tl.split(odd_3)
    words = w0, w1, w2, w3, w4, w5, w6, w7
    even_GTH = tl.join(_eight(words, 0, BITS), _eight(words, 2, BITS))
    odd_GTH = tl.join(_eight(words, 1, BITS), _eight(words, 3, BITS))
    eight_TE = tl.reshape(tl.permute(tl.join(even_GTH, odd_GTH), (1, 0, 2, 3)), (T, C // 8))
    code_TEV = eight_TE[:, :, None] >> (BITS * tl.arange(0, 8))[None, None, :]
    return tl.reshape(code_TEV, (T, C)).to(tl.int32)


@triton.jit
def _eight(words, PLACE: tl.constexpr, BITS: tl.constexpr):
    """Return the bits of the eight codes of this place, and others above them, from the words of 32 codes."""
    eight = tl.zeros_like(words[0])
    for j in tl.static_range(BITS):
        eight |= _shift_left(words[j], 32 * j - 8 * BITS * PLACE)
    return eight


# ---- a format in the kernels: ScalingFunctions, as kernels/reference/formats.py has a Scaling for it
#
# A scale is the byte that a block stores; ``tensor`` is the exponent of the whole tensor, if the format stores one.
# Scales, keys and values may have any shape that broadcasts against each other.

NAN_EXPONENT = tl.constexpr(_formats.NAN_EXPONENT)
SIGN = tl.constexpr(_formats.SIGN)
LARGEST_E4M3 = tl.constexpr(_formats.LARGEST_E4M3)
MIN_TENSOR_EXPONENT = tl.constexpr(_SignedNVInt.exponents[0] + _BIAS)
MAX_TENSOR_EXPONENT = tl.constexpr(_SignedNVInt.exponents[1] + _BIAS)


class ScalingFunctions(NamedTuple):
    """Functions of ``triton.jit``. All take BITS as their last argument."""

    key: JITFunction  #: (x) -> a number per value, the largest of a block for its largest value
    scale: JITFunction  #: (largest key of a block, tensor) -> the block's scale
    is_nan: JITFunction  #: (scale, tensor) -> whether the block is NaN
    divide: JITFunction  #: (x, scale, tensor) -> x / step; anything if the block is NaN
    multiply: JITFunction  #: (code as a float, scale, tensor) -> code * step; NaN if the block is NaN

    @property
    def cache_key(self) -> str:
        """Return Triton's key of compiled kernels, which changes when a function above is edited."""
        return "".join(part.cache_key for part in self)


class Target(NamedTuple):
    """The grid that a tile is rounded to, known when the kernel is compiled."""

    scaling: ScalingFunctions
    bits: int
    smallest: int  #: the smallest code
    low: int  #: lowest exponent that the format stores for the whole tensor; -1: it stores none
    high: int  #: highest exponent, as above
    pack: bool  #: into codes and scales, else values
    word: int  #: bits of the words in which codes are stored

    @property
    def cache_key(self) -> str:
        """Return Triton's key of compiled kernels."""
        return f"{self.scaling.cache_key}{self[1:]}"


@triton.jit
def _power_key(x, BITS: tl.constexpr):
    return magnitude(x)


@triton.jit
def _power_scale(key, tensor, BITS: tl.constexpr):
    return key >> 23


@triton.jit
def _power_is_nan(scale, tensor, BITS: tl.constexpr):
    return scale == NAN_EXPONENT


@triton.jit
def _power_divide(x, scale, tensor, BITS: tl.constexpr):
    return times_power(x, 1.0, -(scale - (BIAS + BITS - 2)))


@triton.jit
def _power_multiply(code, scale, tensor, BITS: tl.constexpr):
    unit = tl.where(scale == NAN_EXPONENT, float("nan"), 1.0)
    return times_power(code, unit, scale - (BIAS + BITS - 2))


#: scales: a power of two per block
POWER = ScalingFunctions(_power_key, _power_scale, _power_is_nan, _power_divide, _power_multiply)


@triton.jit
def _signed_key(x, BITS: tl.constexpr):
    """Return the bits of |x|, and below them a bit that is 1 for positive x."""
    bits = x.to(tl.uint32, bitcast=True)
    return ((bits << 1) | (bits >> 31)) ^ 1


@triton.jit
def _e4m3_scale(key, tensor, BITS: tl.constexpr):
    # |x_M| / 2^(bits-1) / T, whose bits do not depend on the width
    x = (key >> 1).to(tl.float32, bitcast=True) * ((-tensor + (2 * BIAS + 7)) << 23).to(tl.float32, bitcast=True)
    x = tl.minimum(x, LARGEST_E4M3)
    bits = x.to(tl.int32, bitcast=True)
    subnormal = (x + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in units of 2^-9, the last place of 2^14
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - ((BIAS - 7) << 3)
    e4m3 = tl.where(x < 0.015625, subnormal, normal)
    scale = e4m3 + tl.where(e4m3 > 0, (key & 1).to(tl.int32) * SIGN, 0)
    return tl.where(tensor == NAN_EXPONENT, 0, scale)


@triton.jit
def _e4m3_is_nan(scale, tensor, BITS: tl.constexpr):
    return tl.zeros_like(scale) + tensor == NAN_EXPONENT


@triton.jit
def _e4m3_divide(x, scale, tensor, BITS: tl.constexpr):
    step = _e4m3_step(scale, tensor, BITS)
    return x * tl.where(step == 0, 0.0, tl.div_rn(1.0, step))


@triton.jit
def _e4m3_multiply(code, scale, tensor, BITS: tl.constexpr):
    return code * tl.where(_e4m3_is_nan(scale, tensor, BITS), float("nan"), _e4m3_step(scale, tensor, BITS))


@triton.jit
def _e4m3_step(scale, tensor, BITS: tl.constexpr):
    size = scale & (SIGN - 1)
    tensor = tl.minimum(tl.maximum(tensor, MIN_TENSOR_EXPONENT), MAX_TENSOR_EXPONENT)  # of any bytes
    lowest = tensor - 7 - BITS - 6  # biased exponent of the step for an E4M3 number whose stored exponent is 0
    subnormal = size.to(tl.float32) * ((lowest - 2) << 23).to(tl.float32, bitcast=True)
    bits = tl.where(size < 8, subnormal.to(tl.int32, bitcast=True), (size << 20) + (lowest << 23))
    return (bits | ((scale & SIGN) << 24)).to(tl.float32, bitcast=True)


#: scales: a signed E4M3 number per block, a power of two per tensor
SIGNED_E4M3 = ScalingFunctions(_signed_key, _e4m3_scale, _e4m3_is_nan, _e4m3_divide, _e4m3_multiply)
