"""Masks and affine codes, which stash policies save besides formats: in PyTorch, the oracle of the backends.

Masks. Bit i % 8 of byte i // 8 belongs to value i; the bits past the last value are 0. Values of 16 bits are compared
in float32.

Affine codes lie between a low and a step of each group:

    step = (max - min) / (2^b - 1)        q = clip(floor((x - low) / step + u), 0, 2^b - 1)        x^ = q step + low

low is the group's minimum. u is 1/2 for nearest; for stochastic rounding 1 - (k + 1) 2^-16, with k the 16-bit number
that codec.uniform draws for the value's position in one long row: on that grid q + u is exact in float32 for every q of
8 bits, so a value on a code stays there, and P(up) differs from the fraction by less than 2^-16.

In running ranges (Mesa, equations 6 and 7) low and step come from means over tensors, which the first finite tensor
starts and one that is not finite leaves as they were:

    alpha <- d alpha + (1 - d) (max - min)        beta <- d beta + (1 - d) min
    step = alpha / (2^b - 1)                      low = beta

low and step are float32, or float64 for float64 values. A group without spread has step 0 and comes back exact. One
that holds a NaN or an infinity, or whose spread overflows, comes back as NaN, all of it.

Shape suffixes: N values; G groups; A, B the runs of a group and their values.
"""

import torch
from torch import Tensor

from dsq.kernels.backend import AffineCodes, Groups, MovingRanges
from dsq.kernels.reference.codec import BLOCK, pack_bits, uniform, unpack_bits


def pack_mask(x_N: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """Return a bit for each value, uint8 (ceil(N / 8),): 1 for values above ``low`` and below ``high`` (NaN: no limit),
    and for NaN if ``nan_is_open``. For bool values it is the value.
    """
    if x_N.dtype is torch.bool:
        open_N = x_N
    else:
        if x_N.dtype is not torch.float64:
            x_N = x_N.float()
        open_N = ~((x_N <= low) | (x_N >= high))
        if not nan_is_open:
            open_N &= x_N == x_N
    return pack_bits(open_N[None], 1)[0]


def unpack_mask(bits: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Return the bits as 0 and 1 of ``dtype``, (count,)."""
    return unpack_bits(bits[None], 1, count, torch.uint8)[0].to(dtype)


def apply_mask(bits: Tensor, x: Tensor) -> Tensor:
    """Return ``x`` (floating, any shape) with 0 where the bit is 0."""
    return torch.where(unpack_mask(bits, x.numel(), torch.bool).view_as(x), x, torch.zeros_like(x))


def scale_mask(bits: Tensor, x: Tensor, factor: float) -> Tensor:
    """Return ``x`` (floating, any shape) times ``factor`` where the bit is 1, else times 0: NaN of an infinity."""
    return unpack_mask(bits, x.numel(), x.dtype).view_as(x).mul_(factor).mul_(x)


#: random numbers that are computed at once. The bound limits scratch memory, as each number takes several 64-bit words
_CHUNK = 1 << 20
assert _CHUNK % BLOCK == 0


def affine_pack(x: Tensor, bits: int, groups: Groups, running: MovingRanges | None, seed: int | None) -> AffineCodes:
    """Return the codes in the running ranges, which the values update first, or in the range of each group."""
    count = x.numel()
    x_AGB = _runs(x.view(-1), groups)
    width_low_2G = _extents(x_AGB)
    if running is not None:
        width_low_2G = _update(running, width_low_2G)
    width_G, low_G = width_low_2G
    step_G = width_G / (2**bits - 1)
    t_AGB = x_AGB.to(step_G.dtype).sub(low_G[:, None]).div_(torch.where(step_G > 0, step_G, 1)[:, None])
    t_N = t_AGB.view(-1)[:count]
    t_N += 0.5 if seed is None else _thresholds(count, seed, x.device).to(t_N.dtype)
    # NaN becomes code 0, which decodes to NaN as the step of its group is NaN
    codes_N = t_N.floor_().clamp_(0, 2**bits - 1).nan_to_num_(0.0).to(torch.uint8)
    return AffineCodes(pack_bits(codes_N[None], bits)[0], torch.stack([low_G, step_G]))


def affine_unpack(packed: AffineCodes, bits: int, groups: Groups, count: int, dtype: torch.dtype) -> Tensor:
    """Return the values q step + low, (count,)."""
    low_G, step_G = packed.ranges
    codes_AGB = _runs(unpack_bits(packed.codes[None], bits, count, torch.uint8)[0], groups)
    return codes_AGB.to(step_G.dtype).mul_(step_G[:, None]).add_(low_G[:, None]).view(-1)[:count].to(dtype)


def _runs(x_N: Tensor, groups: Groups) -> Tensor:
    """Return the values of each group, (A, G, B). A short last run is filled up with its last value."""
    padding = -x_N.numel() % (groups.run * groups.number)
    return torch.cat([x_N, x_N[-1:].expand(padding)]).view(-1, groups.number, groups.run)


def _extents(x_AGB: Tensor) -> Tensor:
    """Return the largest minus the smallest value of each group, and the smallest."""
    dtype = torch.promote_types(x_AGB.dtype, torch.float32)
    low_G, high_G = x_AGB.amin((0, 2)).to(dtype), x_AGB.amax((0, 2)).to(dtype)
    return torch.stack([high_G - low_G, low_G])


def _update(running: MovingRanges, range_2G: Tensor) -> Tensor:
    """Update the means by the range of a tensor, unless it is not finite, and return them; NaN if it is not."""
    mean_2G = running.alpha_beta
    new_mean_2G = torch.where(mean_2G.isnan(), range_2G, running.decay * mean_2G + (1 - running.decay) * range_2G)
    finite_G = range_2G.isfinite().all(0)
    mean_2G.copy_(torch.where(finite_G, new_mean_2G, mean_2G))
    return torch.where(finite_G, new_mean_2G, torch.nan)


def _thresholds(count: int, seed: int, device: torch.device) -> Tensor:
    """Return u of each value for stochastic rounding. ``uniform`` returns (k + 1/2) 2^-16."""
    parts = [
        1 - 0.5**17 - uniform(1, min(_CHUNK, count - begin), seed, device, first_block=begin // BLOCK)[0]
        for begin in range(0, count, _CHUNK)
    ]
    return torch.cat(parts)
