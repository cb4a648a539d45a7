"""8-bit codes of a tensor's groups, in the running range of each group."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsq.kernels.backend import Groups
from dsq.kernels.dispatch import affine_extents
from dsq.packing import Rounding
from dsq.stash.saved_tensors.affine import AffineGroups, pack

BITS = 8


@dataclass
class RunningRanges:
    """Ranges by tensor (the path of the module that made it, and its order there), and the count of codes made.

    The range a tensor was coded in is kept with its codes: a later forward moves the running one.
    """

    decay: float
    rounding: Rounding
    seed: int
    count: int = 0  #: seeds the rounding, with `seed`
    alpha_beta: dict[str, Tensor] = field(default_factory=dict)  #: (2, groups); NaN until a finite tensor was seen

    def pack(self, key: str, values: Tensor, groups: Groups) -> AffineGroups:
        """Update the range of `key` by `values`, and code them in it."""
        ranges = self._now(key, values, groups)
        self.count += 1
        return pack(values, BITS, groups, ranges, self.rounding, self.seed + self.count - 1)

    def _now(self, key: str, values: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """(low, step) of each group after the update."""
        low, high = affine_extents(values, groups)
        now = torch.stack([high - low, low])
        before = self.alpha_beta.get(key)
        before = torch.full_like(now, math.nan) if before is None or before.shape != now.shape else before.to(now)
        merged = torch.where(before.isnan(), now, self.decay * before + (1 - self.decay) * now)
        # an overflow (loss scaling meets them) must show in this gradient and leave the estimate as it was
        finite = now.isfinite().all(0)
        self.alpha_beta[key] = torch.where(finite, merged, before)
        alpha, beta = torch.where(finite, merged, math.nan)
        return beta, alpha / (2**BITS - 1)
