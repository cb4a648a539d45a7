"""8-bit codes of a tensor's groups, in the running range of each group."""

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsq.kernels.backend import Groups, Running
from dsq.packing import Rounding
from dsq.stash.saved_tensors.affine import AffineGroups, pack
from dsq.stash.saved_tensors.memory_order import MemoryOrder

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

    #: how each tensor was grouped, and its memory order and the kind of operation that saved it then
    groups: dict[str, tuple[tuple[MemoryOrder, str | None], Groups]] = field(default_factory=dict)

    def pack(self, key: str, values: Tensor, groups: Groups) -> AffineGroups:
        """Update the range of `key` by `values`, and code them in it."""
        ranges, dtype = self.alpha_beta.get(key), torch.promote_types(values.dtype, torch.float32)
        if ranges is None or ranges.shape[1] != groups.number:
            ranges = torch.full((2, groups.number), math.nan, dtype=dtype, device=values.device)
        self.alpha_beta[key] = ranges = ranges.to(values.device, dtype)
        seed = None if self.rounding == "nearest" else self.seed + self.count
        self.count += 1
        return pack(values, BITS, groups, Running(ranges, self.decay), seed)
