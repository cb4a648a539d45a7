"""The block formats against their definitions in integers: every bfloat16 at each place of a block, random blocks, and
(.ci/slow) every float32.

A finite float32 is (-1)^s M 2^(q - 150), M a whole number below 2^24 and q in 1..254. Codes and scales are computed in
whole numbers alone, the two roundings to float32 that snvint has included: of a step's inverse, and of the quotient. A
value is the product of its code and its step, which float32 holds. Shape suffixes: B blocks, X the values of a block.
"""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from dsq.formats import BFP, Format, Layout, SignedNVInt
from dsq.kernels.backend import Backend
from dsq.kernels.conformance import same_bits
from dsq.kernels.cpu.backend import backend
from dsq.kernels.cpu.library import LIBRARY, library
from dsq.kernels.reference.backend import REFERENCE

BACKENDS = [REFERENCE, *(backend(isa) for isa in (library().instruction_sets() if LIBRARY.exists() else ()))]
BLOCK_SIZE = 16
INFINITY = 0x7F800000

# ---- the definitions ----


class Expected(NamedTuple):
    """Codes and scales that a tensor of blocks packs to, and its quantized values."""

    scales: np.ndarray  #: uint8, as they are stored
    codes: np.ndarray  #: (B, X)
    values: np.ndarray  #: (B, X) float32


def shortened(m: np.ndarray, places: np.ndarray) -> np.ndarray:
    """m / 2^places to the nearest whole number, ties to even, with ``places`` brought to 1..25.

    More leave nothing of an m up to 2^24; with fewer, as with one, an m from 2^23 on is beyond any code."""
    places = np.clip(places, 1, 25)
    return (m + (1 << places - 1) - 1 + (m >> places & 1)) >> places


def magnitude(bits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """M and q of float32, given as bits."""
    exponent = bits >> 23 & 0xFF
    return (bits & 0x7FFFFF) + ((exponent > 0) << 23), np.maximum(exponent, 1)


def extremes(bits_BX: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitude of each block, as bits of float32, and whether a positive value has it."""
    top_B = (bits_BX & 0x7FFFFFFF).max(1)
    return top_B, (bits_BX == top_B[:, None]).any(1)


def on_grid(bits_BX: np.ndarray, size_BX: np.ndarray, width: int, negative_B: np.ndarray) -> np.ndarray:
    """Codes: rounded quotients of magnitudes ``size_BX`` with the sign of value / step, clipped."""
    opposite_BX = (bits_BX >> 31 == 1) != negative_B[:, None]
    return np.where(opposite_BX, -size_BX, size_BX).clip(-(2 ** (width - 1)), 2 ** (width - 1) - 1)


def bfp(bits_BX: np.ndarray, width: int) -> Expected:
    """step = 2^(E - (width - 2)), E = floor(log2 |x_M|), at least -127; codes of either sign up to 2^(width-1) - 1."""
    top_B, _ = extremes(bits_BX)
    stored_B, broken_B = top_B >> 23, top_B >= INFINITY
    m_BX, q_BX = magnitude(bits_BX)
    e_B = stored_B - 127
    size_BX = shortened(m_BX, (e_B - (width - 2) + 150)[:, None] - q_BX).clip(max=2 ** (width - 1) - 1)
    codes_BX = np.where(broken_B[:, None], 0, np.where(bits_BX >> 31 == 1, -size_BX, size_BX))
    step_B = np.ldexp(np.float32(1), e_B - (width - 2))
    step_B[broken_B] = np.nan
    return Expected(stored_B.astype(np.uint8), codes_BX, codes_BX.astype(np.float32) * step_B[:, None])


#: 1 / n = inverse 2^-places in float32, of n up to 15, which are never halfway between two; 0 of 0
INVERSE_PLACES = np.array([0, *(23 + (n - 1).bit_length() for n in range(1, 16))])
INVERSES = np.array([0, *((2 ** (places + 1) + n) // (2 * n) for n, places in enumerate(INVERSE_PLACES.tolist()) if n)])


def signed_nvint(bits_BX: np.ndarray, width: int) -> Expected:
    """step = -sign(x_M) e4m3(|x_M| / 2^(width-1) / T) T, T = 2^(E - width - 6), and E = floor(log2 max|x|) over the
    tensor, clipped to -90..120."""
    top_B, positive_B = extremes(bits_BX)
    if top_B.max() >= INFINITY:
        nothing_BX = np.zeros_like(bits_BX)
        scales = np.append(nothing_BX[:, 0], 255).astype(np.uint8)
        return Expected(scales, nothing_BX, np.full(bits_BX.shape, np.nan, np.float32))
    e = np.clip(magnitude(top_B.max())[1] - 127, -90, 120)

    m_B, q_B = magnitude(top_B)
    s_B = q_B - 143 - e  # |x_M| / 2^(width-1) / T = M 2^s
    places_B = np.maximum(20, -9 - s_B)  # E4M3 has 4 bits, and none below 2^-9
    e4m3_B = np.minimum(shortened(m_B, places_B) + 8 * (places_B + s_B + 9), 126)  # 126 is 448
    negative_B = positive_B & (e4m3_B > 0)
    n_B = (e4m3_B & 7) + 8 * (e4m3_B > 7)
    k_B = np.maximum(e4m3_B >> 3, 1) - 10 + e - width - 6  # |step| = n 2^k

    m_BX, q_BX = magnitude(bits_BX)
    product_BX = m_BX * INVERSES[n_B][:, None]
    more_BX = 23 + (product_BX >= 1 << 47)
    quotient_BX = shortened(product_BX, more_BX)  # 24 bits; of subnormal values fewer, whose codes are 0
    size_BX = shortened(quotient_BX, 150 + (INVERSE_PLACES[n_B] + k_B)[:, None] - q_BX - more_BX)
    codes_BX = on_grid(bits_BX, size_BX, width, negative_B)
    step_B = np.ldexp(np.where(negative_B, -n_B, n_B).astype(np.float32), k_B)
    scales = np.append(e4m3_B + 128 * negative_B, e + 127).astype(np.uint8)
    return Expected(scales, codes_BX, codes_BX.astype(np.float32) * step_B[:, None])


DEFINITIONS = {BFP: bfp, SignedNVInt: signed_nvint}


def expected(fmt: Format, x_BX: Tensor) -> Expected:
    bits_BX = x_BX.float().view(torch.int32).numpy().astype(np.int64) & 0xFFFFFFFF
    return DEFINITIONS[type(fmt)](bits_BX, fmt.bits)


# ---- the comparison ----


def bitstreams(codes_RC: np.ndarray, width: int) -> Tensor:
    """Return the low bits of codes, a row after the other, as bytes."""
    fields_RCW = (codes_RC.astype(np.int16)[..., None] >> np.arange(width, dtype=np.int16) & 1).astype(np.uint8)
    return torch.from_numpy(np.packbits(fields_RCW.reshape(len(codes_RC), -1), axis=1, bitorder="little"))


def disagreements(kernels: Backend, fmt: Format, x_BX: Tensor, definition: Expected) -> list[str]:
    """Return the names of results that differ from the definition, with blocks along the columns and along the rows."""
    scales, codes_BX, values_BX = definition
    row = BLOCK_SIZE * gcd(len(x_BX), 128)
    differing = []
    for dim, (x, codes, values) in {
        -1: (x_BX.view(-1, row), codes_BX.reshape(-1, row), values_BX.reshape(-1, row)),
        0: (x_BX.t().contiguous(), codes_BX.T, values_BX.T),
    }.items():
        layout = Layout.of(tuple(x.shape), dim)
        packed = kernels.pack(x, fmt, layout, None)
        quantized = torch.from_numpy(np.ascontiguousarray(values))
        pairs = {
            "codes": (bitstreams(codes, fmt.bits), packed[0]),
            "scales": (torch.from_numpy(scales), packed[1].flatten()),
            "unpack": (quantized, kernels.unpack(*packed, fmt, layout, torch.float32).view(x.shape)),
            "quantize": (quantized, kernels.quantize(x, fmt, layout, None, torch.float32)),
        }
        differing += [f"{kernels.name} dim {dim} {result}" for result, pair in pairs.items() if not same_bits(*pair)]
    return differing


def check(fmt: Format, x_BX: Tensor, backends: Sequence[Backend] = BACKENDS) -> None:
    """Compare the backends with the definition."""
    definition = expected(fmt, x_BX)
    serving = [kernels for kernels in backends if kernels.serves(fmt)]
    assert [result for kernels in serving for result in disagreements(kernels, fmt, x_BX, definition)] == []


# ---- blocks ----


def every_bfloat16(exponents: range, seed: int) -> Iterator[Tensor]:
    """Yield tensors of blocks (B, BLOCK_SIZE) that have each bfloat16 with these exponents in each place of a block.

    The other values of a block are of nearly its size. Each finite value comes in three tensors whose largest values
    differ; NaN and infinities come once, in tensors of a block each.
    """
    generator = np.random.default_rng(seed)

    def similar_values(exponent: int, number: int) -> np.ndarray:
        exponents = np.clip(exponent + generator.integers(-4, 2, (number, BLOCK_SIZE)), 0, 254)
        return (
            exponents << 7
            | generator.integers(0, 2, (number, BLOCK_SIZE)) << 15
            | generator.integers(0, 128, (number, BLOCK_SIZE))
        )

    for exponent in exponents:
        value = np.arange(256)[:, None] % 128 | exponent << 7 | np.arange(256)[:, None] // 128 << 15
        for above in (0, 6, 15) if exponent < 255 else (0,):
            bits_VPX = similar_values(exponent, 256 * BLOCK_SIZE).reshape(256, BLOCK_SIZE, BLOCK_SIZE)
            bits_VPX[:, np.arange(BLOCK_SIZE), np.arange(BLOCK_SIZE)] = value
            largest = similar_values(min(exponent + above, 254), 128)
            bits_BX = np.concatenate([bits_VPX.reshape(-1, BLOCK_SIZE), largest]).astype(np.uint16)
            x_BX = torch.from_numpy(bits_BX.view(np.int16)).view(torch.bfloat16)
            yield from [x_BX] if exponent < 255 else x_BX.split(1)


def random_blocks(number: int, width: int, seed: int) -> Tensor:
    """Return a float32 tensor of blocks (B, BLOCK_SIZE), a sixth of each kind. One tensor in eight is not finite."""
    generator = np.random.default_rng(seed)
    part = number // 6
    shape, rows, place = (part, BLOCK_SIZE), np.arange(part), generator.integers(0, BLOCK_SIZE, part)
    sign_B = generator.choice([-1.0, 1.0], part)

    normal = generator.standard_normal(shape)
    binades = np.ldexp(generator.uniform(-2, 2, shape), -generator.integers(0, 12, shape))
    ties = generator.integers(1, 16, (part, 1)) * generator.integers(-(2**width), 2**width + 1, shape) / 2.0**width
    both_signs = generator.standard_normal(shape)
    both_signs[rows, place] = np.abs(both_signs).max(1) * sign_B
    both_signs[rows, (place + generator.integers(1, BLOCK_SIZE, part)) % BLOCK_SIZE] = -both_signs[rows, place]
    thresholds = generator.uniform(-1, 1, shape)  # of a scale, or a unit in the last place away
    rise = generator.integers(0, 16, part) / 16
    thresholds[rows, place] = sign_B * (1 + rise + generator.integers(-1, 2, part) * 2.0**-23)
    zeros = generator.standard_normal(shape) * (generator.random(shape) < generator.choice([0, 0.1, 0.5], (part, 1)))

    units_BX = generator.permutation(np.concatenate([normal, binades, ties, both_signs, thresholds, zeros]))
    lower_B = generator.integers(0, generator.choice([1, 5, 20, 250]), (len(units_BX), 1))
    with np.errstate(over="ignore"):
        x_BX = np.ldexp(units_BX, generator.integers(-149, 128) - lower_B).astype(np.float32)
    x_BX = x_BX.clip(*np.array([-1, 1], np.float32) * np.finfo(np.float32).max)
    if generator.integers(8) == 0:
        not_finite = (
            generator.integers(0, number, max(number // 64, 1)),
            generator.integers(0, BLOCK_SIZE, max(number // 64, 1)),
        )
        x_BX[not_finite] = generator.choice(np.array([np.nan, np.inf, -np.inf], np.float32), len(not_finite[0]))
    return torch.from_numpy(x_BX)


# ---- tests ----

LARGE = 6 << 11  #: blocks of a tensor whose largest value the kernels guess first
PARTS, TENSORS = 4, 204  #: PARTS * TENSORS * LARGE = 10,027,008 blocks
KINDS = pytest.mark.parametrize("kind", DEFINITIONS)
IN_USE = [(kind, width) for kind in DEFINITIONS for width in (2, 3, 4, min(kind.useful_to, 8))]


@KINDS
def test_some_random_blocks(kind: type[Format]) -> None:
    for width in range(2, 17):
        check(kind(width), torch.ldexp(1 + torch.rand(254, BLOCK_SIZE), torch.arange(-126, 128)[:, None]))
        for size in range(0, 12, 2):
            check(kind(width), random_blocks(6 << size, width, seed=100 * width + size))


@KINDS
def test_some_bfloat16(kind: type[Format]) -> None:
    for exponent in (0, 1, 30, 36, 37, 127, 246, 247, 254):
        for x_BX in every_bfloat16(range(exponent, exponent + 1), seed=exponent):
            check(kind(2 + exponent % 5), x_BX)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "width"), IN_USE)
def test_every_bfloat16(kind: type[Format], width: int) -> None:
    for x_BX in every_bfloat16(range(256), seed=width):
        check(kind(width), x_BX)


@pytest.mark.parametrize("width", [2, 9, *(pytest.param(width, marks=pytest.mark.slow) for width in range(3, 17))])
def test_every_float16(width: int) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    check(BFP(width), torch.from_numpy(bits).view(-1, BLOCK_SIZE))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize(("kind", "width"), IN_USE)
def test_many_random_blocks(kind: type[Format], width: int, part: int) -> None:
    for seed in range(part * TENSORS, (part + 1) * TENSORS):
        check(kind(width), random_blocks(LARGE, width, seed))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
@pytest.mark.parametrize("width", [2, 4, 8])
def test_every_float32(width: int, part: int) -> None:
    """The values of a block differ in the lowest bit of their exponent and the top three of their significand."""
    chunk = 1 << 18
    for begin in range(part << 28, (part + 1) << 28, chunk):
        number = np.arange(begin, begin + chunk, dtype=np.uint32)
        bits = (number << np.uint32(20) | number >> np.uint32(12)).view(np.float32)
        check(BFP(width), torch.from_numpy(bits).view(-1, BLOCK_SIZE), BACKENDS[1:2])
