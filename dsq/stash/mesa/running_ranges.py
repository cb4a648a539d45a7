"""8-bit codes of a tensor's groups, in the running range of each group."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsq.stash.saved_tensors.affine import Noise, decode, encode


@dataclass(frozen=True)
class HeadCodes:
    """8-bit codes beside the range they were made with (not the running one: a later forward moves that)."""

    codes: Tensor
    low: Tensor
    step: Tensor

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.low.nbytes + self.step.nbytes

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return decode(self.codes, self.low, self.step, dtype)


@dataclass
class RunningRanges:
    """Ranges by tensor (the path of the module that made it, and its order there), and the count of codes made."""

    decay: float
    rounding: str
    seed: int
    count: int = 0  #: seeds the rounding, with `seed`
    alpha_beta: dict[str, Tensor] = field(default_factory=dict)  #: (2, groups); NaN until a finite tensor was seen

    def quantize(self, key: str, values: Tensor, group_axis: int) -> HeadCodes:
        """Update the range of `key` by `values`, and code them in it."""
        low, step = self._now(key, values, group_axis)
        noise = Noise(values.device, self.rounding, self.seed + self.count)
        self.count += 1
        return HeadCodes(encode(values, low, step, 8, noise), low, step)

    def _now(self, key: str, values: Tensor, group_axis: int) -> tuple[Tensor, Tensor]:
        """(low, step) after the update, shaped to broadcast against the values."""
        others = tuple(axis for axis in range(values.dim()) if axis != group_axis)
        wide = torch.promote_types(values.dtype, torch.float32)
        low, high = values.amin(others).to(wide), values.amax(others).to(wide)
        now = torch.stack([high - low, low])
        before = self.alpha_beta.get(key)
        before = torch.full_like(now, math.nan) if before is None else before.to(now)
        merged = torch.where(before.isnan(), now, self.decay * before + (1 - self.decay) * now)
        # an overflow (loss scaling meets them) must show in this gradient and leave the estimate as it was
        finite = now.isfinite().all(0)
        self.alpha_beta[key] = torch.where(finite, merged, before)
        alpha, beta = torch.where(finite, merged, math.nan)
        shape = [-1 if axis == group_axis else 1 for axis in range(values.dim())]
        return beta.view(shape), (alpha / 255).view(shape)
