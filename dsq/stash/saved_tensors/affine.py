"""Per-group asymmetric quantisation with stochastic rounding, and codes of 1 to 8 bits packed without a gap.

    step = (max - min) / (2^b - 1)        q = clip(floor((x - min) / step + u), 0, 2^b - 1)        x^ = q step + min

u is uniform in [0, 1) for stochastic rounding (so E[x^] = x inside the range) and 1/2 for nearest. This is the
quantiser of GACT (appendix A.4; groups of consecutive values) and of Mesa (equations 3 to 5; groups along an axis,
ranges from running estimates).

A group without spread has step 0 and comes back exact. A group that holds a NaN or an infinity, or whose spread
overflows, comes back as NaN: a loss scaler still sees it.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.arguments import choice, whole_number

ROUNDINGS = ("stochastic", "nearest")
#: values encoded at once: what a core's cache holds; a bound on scratch memory
_CHUNK = {"cpu": 1 << 18, "cuda": 1 << 24}


@dataclass(frozen=True)
class AffineGroups:
    """A flat tensor quantised in groups of consecutive values; the last group may be short."""

    codes: Tensor  #: uint8, ceil(numel * bits / 8) bytes
    low: Tensor  #: (groups,) smallest value of each group
    step: Tensor  #: (groups,) distance of neighbouring codes
    bits: int
    group: int
    numel: int

    @property
    def nbytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in (self.codes, self.low, self.step))

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The (numel,) values q step + min, in `dtype`."""
        codes_N = unpack_codes(self.codes, self.bits, self.numel)
        full = self.numel // self.group
        head = decode(
            codes_N[: full * self.group].view(full, self.group), self.low[:full, None], self.step[:full, None], dtype
        )
        if full * self.group == self.numel:
            return head.view(-1)
        return torch.cat([head.view(-1), decode(codes_N[full * self.group :], self.low[full], self.step[full], dtype)])


def quantize_groups(
    x: Tensor, bits: int, group: int = 256, rounding: str = "stochastic", seed: int = 0
) -> AffineGroups:
    """Quantise x, read in its memory order as one row, to `bits` bits in groups of `group` values.

    Bytes kept: ceil(numel bits / 8) + 8 ceil(numel / group); the pair (min, step) is fp32 (fp64 for an fp64 tensor).

    Raises:
        ValueError: bits outside 1..8, group < 1, an unknown rounding.
    """
    whole_number("bits", bits, 1, 8)
    whole_number("group", group, 1)
    x_N = x.detach().reshape(-1)
    full = x_N.numel() // group
    head_GN, tail_N = x_N[: full * group].view(full, group), x_N[full * group :]
    low_G, step_G = ranges(head_GN, bits, dim=1)
    if tail_N.numel():
        low, step = ranges(tail_N, bits, dim=0)
        low_G, step_G = torch.cat([low_G.view(-1), low.view(-1)]), torch.cat([step_G.view(-1), step.view(-1)])
    low_G, step_G = low_G.view(-1), step_G.view(-1)
    noise = Noise(x.device, rounding, seed)
    codes_N = torch.empty(x_N.numel(), dtype=torch.uint8, device=x.device)
    rows = max(1, _CHUNK.get(x.device.type, 1 << 20) // group)
    for first in range(0, full, rows):
        part = slice(first, min(first + rows, full))
        codes = encode(head_GN[part], low_G[part, None], step_G[part, None], bits, noise)
        codes_N[part.start * group : part.stop * group] = codes.view(-1)
    if tail_N.numel():
        codes_N[full * group :] = encode(tail_N, low_G[full], step_G[full], bits, noise)
    return AffineGroups(pack_codes(codes_N, bits), low_G, step_G, bits, group, x_N.numel())


def ranges(x: Tensor, bits: int, dim: int | tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """(min, step) over `dim`, kept as axes of size 1, in fp32 or the wider type of x."""
    # amin and amax: on CPU, PyTorch's aminmax of the same axis takes three times as long as both
    low = x.amin(dim, keepdim=True).to(_wide(x.dtype))
    high = x.amax(dim, keepdim=True).to(_wide(x.dtype))
    return low, (high - low) / (2**bits - 1)


def encode(x: Tensor, low: Tensor, step: Tensor, bits: int, noise: "Noise") -> Tensor:
    """uint8 codes clip(floor((x - low) / step + u), 0, 2^bits - 1), one a value; low and step broadcast against x."""
    position = x.to(_wide(x.dtype)).sub(low).div_(torch.where(step > 0, step, torch.ones_like(step)))
    noise.add_to(position)
    # NaN has no integer: code 0, and the group's own NaN step brings it back
    return position.floor_().clamp_(0, 2**bits - 1).nan_to_num_(0.0).to(torch.uint8)


def decode(codes: Tensor, low: Tensor, step: Tensor, dtype: torch.dtype) -> Tensor:
    """codes * step + low, computed in the type of step and returned in `dtype`."""
    return codes.to(step.dtype).mul_(step).add_(low).to(dtype)


class Noise:
    """The u of stochastic rounding, from a generator of its own: the user's random stream is left as it was.

    u is one of the 65536 multiples of 2^-16 in [0, 1). On that grid code + u is exact in fp32 for every code of 8 bits,
    so a value on a code stays there (GACT's assumption B3), and P(up) differs from the fraction by less than 2^-16.
    """

    def __init__(self, device: torch.device, rounding: str, seed: int) -> None:
        self.generator = None
        if choice("rounding", rounding, ROUNDINGS) == "stochastic":
            self.generator = torch.Generator(device).manual_seed(seed)

    def add_to(self, position: Tensor) -> None:
        if self.generator is None:
            position.add_(0.5)
            return
        # four 16-bit draws from each 64-bit number: the generator is the slow part on CPU
        words = torch.empty(math.ceil(position.numel() / 4), dtype=torch.int64, device=position.device)
        words.random_(-(2**63), None, generator=self.generator)
        u = words.view(torch.int16)[: position.numel()].view(position.shape)
        position.add_(u.to(position.dtype).add_(32768.0), alpha=2.0**-16)


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


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
