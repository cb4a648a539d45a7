"""Codes between a low and a step of each group, in plain PyTorch on any device: the oracle of the backends'.

    step = (max - min) / (2^b - 1)        q = clip(floor((x - low) / step + u), 0, 2^b - 1)        x^ = q step + low

low is the group's minimum, or what the caller says. u is 1/2 for nearest; for stochastic rounding 1 - (k + 1) 2^-16,
with k the 16-bit number that philox.py draws for the value's position in one long row: on that grid q + u is exact in
float32 for every q of 8 bits, so a value on a code stays there, and P(up) differs from the fraction by less than 2^-16.

low and step are float32, or float64 for float64 values. A group without spread has step 0 and comes back exact. One
that holds a NaN or an infinity, or whose spread overflows, comes back as NaN, all of it.

Shape suffixes: N values; G groups; A, B the runs of a group and their values.
"""

import math

import torch
from torch import Tensor

from dsq.kernels.backend import AffineCodes, Groups
from dsq.kernels.reference.philox import BLOCK, uniform

#: values that are worked on at once: a bound on scratch memory
_CHUNK = 1 << 20
assert _CHUNK % BLOCK == 0


def extents(x_N: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each group, (G,)."""
    short = -x_N.numel() % (groups.run * groups.number)  # the last run, of the last group, may be short
    x_AGB = torch.cat([x_N, x_N[-1:].expand(short)]).view(-1, groups.number, groups.run)
    wide = torch.promote_types(x_N.dtype, torch.float32)
    return x_AGB.amin((0, 2)).to(wide), x_AGB.amax((0, 2)).to(wide)


def pack(x_N: Tensor, bits: int, groups: Groups, ranges: tuple[Tensor, Tensor] | None, seed: int | None) -> AffineCodes:
    """Codes in the ranges (low, step) given, or in the values' own."""
    if ranges is None:
        low_G, high_G = extents(x_N, groups)
        ranges = low_G, (high_G - low_G) / (2**bits - 1)
    low_G, step_G = ranges
    codes_N = torch.empty(x_N.numel(), dtype=torch.uint8, device=x_N.device)
    for begin in range(0, x_N.numel(), _CHUNK):
        part = slice(begin, begin + _CHUNK)
        group = _groups_of(groups, begin, x_N[part])
        step = step_G[group]
        position = x_N[part].to(step.dtype).sub(low_G[group]).div_(torch.where(step > 0, step, torch.ones_like(step)))
        if seed is None:
            position += 0.5
        else:
            uniform_N = uniform(1, position.numel(), seed, x_N.device, first_block=begin // BLOCK)[0]  # (k + 1/2) 2^-16
            position += (1 - 0.5**17 - uniform_N).to(position.dtype)
        # NaN has no integer: code 0, and the group's own NaN step brings it back
        codes_N[part] = position.floor_().clamp_(0, 2**bits - 1).nan_to_num_(0.0).to(torch.uint8)
    return AffineCodes(pack_codes(codes_N, bits), low_G, step_G)


def unpack(packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
    """The (count,) values q step + low."""
    codes_N = unpack_codes(packed.codes, bits, count)
    values_N = torch.empty(count, dtype=dtype, device=codes_N.device)
    for begin in range(0, count, _CHUNK):
        part = slice(begin, begin + _CHUNK)
        group = _groups_of(groups, begin, codes_N[part])
        values_N[part] = codes_N[part].to(packed.step.dtype).mul_(packed.step[group]).add_(packed.low[group])
    return values_N


def _groups_of(groups: Groups, begin: int, values: Tensor) -> Tensor:
    index = torch.arange(begin, begin + values.numel(), device=values.device)
    return index.div_(groups.run, rounding_mode="floor").remainder_(groups.number)


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """Flat uint8 codes of `bits` bits as one little-endian bit stream of ceil(numel bits / 8) bytes."""
    if bits == 8:
        return codes.contiguous()
    count, width = _word(bits)
    short = -codes.numel() % count
    if short:
        codes = torch.cat([codes, codes.new_zeros(short)])
    columns = codes.view(-1, count)
    # uint8 holds a whole word when the codes fill exactly one byte
    word = columns[:, 0].to(torch.uint8 if width == 1 else torch.int64)
    for index in range(1, count):
        word = word | (columns[:, index].to(word.dtype) << (bits * index))
    stream = word.view(-1, 1) if width == 1 else word.view(-1, 1).view(torch.uint8)[:, :width]
    return stream.reshape(-1)[: math.ceil((codes.numel() - short) * bits / 8)].clone()


def unpack_codes(stream: Tensor, bits: int, numel: int) -> Tensor:
    """The (numel,) uint8 codes of a stream written by pack_codes."""
    if bits == 8:
        return stream
    count, width = _word(bits)
    short = -stream.numel() % width
    if short:
        stream = torch.cat([stream, stream.new_zeros(short)])
    columns = stream.view(-1, width)
    word = columns[:, 0]
    if width > 1:
        word = word.to(torch.int64)
        for index in range(1, width):
            word = word | (columns[:, index].to(torch.int64) << (8 * index))
    codes = torch.empty(word.numel(), count, dtype=torch.uint8, device=stream.device)
    for index in range(count):
        codes[:, index] = (word >> (bits * index)) & (2**bits - 1)
    return codes.view(-1)[:numel]


def _word(bits: int) -> tuple[int, int]:
    """(codes, bytes) of the shortest run of codes that ends on a byte."""
    common = math.gcd(bits, 8)
    return 8 // common, bits // common
