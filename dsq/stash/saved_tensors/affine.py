"""Per-group asymmetric quantisation in 1 to 8 bits: the quantiser of GACT (appendix A.4; groups of consecutive values)
and of Mesa (equations 3 to 5; groups along an axis, ranges from running estimates).

    step = (max - min) / (2^b - 1)        q = clip(floor((x - min) / step + u), 0, 2^b - 1)        x^ = q step + min

Rounding and edge cases: kernels/reference/affine.py.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.kernels.affine import affine_pack, affine_unpack
from dsq.kernels.backend import AffineCodes, Groups, Running
from dsq.packing import Rounding


@dataclass(eq=False, slots=True)  # as Kept
class AffineGroups:
    """A tensor's values, in memory order, quantised in groups; what a ForwardStash takes as code."""

    codes: Tensor  #: uint8, ceil(numel * bits / 8) bytes
    ranges: Tensor  #: (2, groups): low, and step, the distance of neighbouring codes
    bits: int
    groups: Groups
    numel: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.ranges.nbytes

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The (numel,) values q step + low, in `dtype`."""
        return affine_unpack(AffineCodes(self.codes, self.ranges), self.bits, self.groups, self.numel, dtype)


def pack(x: Tensor, bits: int, groups: Groups, running: Running | None, seed: int | None) -> AffineGroups:
    """Pack x (contiguous) in running ranges of its groups, moved by x; None: each group is one run, in its own range.

    seed: of stochastic rounding; None: to nearest.
    """
    codes, ranges = affine_pack(x, bits, groups, running, seed)
    return AffineGroups(codes, ranges, bits, groups, x.numel())


def pack_groups(
    x: Tensor, bits: int, group: int = 256, rounding: Rounding = "stochastic", seed: int = 0
) -> AffineGroups:
    """Pack x, read in its memory order as one row, in `bits` bits in groups of `group` values.

    Bytes kept: ceil(numel bits / 8) + 8 ceil(numel / group); the pair (low, step) is fp32 (fp64 for an fp64 tensor).
    """
    return pack(x, bits, Groups(group, -(-x.numel() // group)), None, None if rounding == "nearest" else seed)
