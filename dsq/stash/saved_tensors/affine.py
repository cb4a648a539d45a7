"""Per-group asymmetric quantisation in 1 to 8 bits: the quantiser of GACT (appendix A.4; groups of consecutive values)
and of Mesa (equations 3 to 5; groups along an axis, ranges from running estimates).

    step = (max - min) / (2^b - 1)        q = clip(floor((x - min) / step + u), 0, 2^b - 1)        x^ = q step + min

Rounding and edge cases: kernels/reference/affine.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.kernels.backend import AffineCodes, Groups
from dsq.kernels.dispatch import affine_pack, affine_unpack
from dsq.packing import Rounding


@dataclass(frozen=True)
class AffineGroups:
    """A tensor's values, in memory order, quantised in groups; what a ForwardStash takes as code."""

    codes: Tensor  #: uint8, ceil(numel * bits / 8) bytes
    low: Tensor  #: (groups,)
    step: Tensor  #: (groups,) distance of neighbouring codes
    bits: int
    groups: Groups
    numel: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The (numel,) values q step + low, in `dtype`."""
        return affine_unpack(AffineCodes(self.codes, self.low, self.step), self.bits, self.groups, self.numel, dtype)


def pack(
    x: Tensor, bits: int, groups: Groups, ranges: tuple[Tensor, Tensor] | None, rounding: Rounding, seed: int
) -> AffineGroups:
    """Pack x (contiguous) in the ranges (low, step) of its groups; None: each group is one run, in its own range."""
    packed = affine_pack(x, bits, groups, ranges, None if rounding == "nearest" else seed)
    return AffineGroups(*packed, bits, groups, x.numel())


def pack_groups(
    x: Tensor, bits: int, group: int = 256, rounding: Rounding = "stochastic", seed: int = 0
) -> AffineGroups:
    """Pack x, read in its memory order as one row, in `bits` bits in groups of `group` values.

    Bytes kept: ceil(numel bits / 8) + 8 ceil(numel / group); the pair (min, step) is fp32 (fp64 for an fp64 tensor).
    """
    return pack(x, bits, Groups(group, -(-x.numel() // group)), None, rounding, seed)
