"""The codes of GACT, and how many bits each saved tensor gets: the integer program (equation 4), solved greedily."""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from torch import Tensor

from dsq.kept import GACT_GROUP
from dsq.kernels.backend import AffineCodes, Groups
from dsq.kernels.dispatch import affine_pack, affine_unpack
from dsq.stash.codes import Code

EXACT = 32  #: the width that stands for "kept as it is"
#: bits that a code may have, narrowest first
WIDTHS = tuple(range(1, 9))


def encode(values_N: Tensor, bits: int, seed: int) -> Code:
    """Code, by groups, by q = floor((x - low) / step + u), step = (max - min) / (2^b - 1) (appendix A.4)."""
    count = values_N.numel()
    groups = Groups(GACT_GROUP, -(-count // GACT_GROUP))
    packed = tuple(affine_pack(values_N, bits, groups, None, seed))
    return packed, lambda codes, dtype: affine_unpack(AffineCodes(*codes), bits, groups, count, dtype)


def factor(bits: int) -> float:
    """Return S(b): how the variance of the rounding depends on the bits (assumption B2); 0 for a tensor kept exact."""
    return 0.0 if bits == EXACT else (2.0**bits - 1) ** -2


Sizes = tuple[int, ...]  #: values of each tensor that one kind of input makes the model save, in order


@dataclass
class BitPlan:
    """The average, and what was measured: sensitivities by number of tensors, layouts by key of input."""

    bits: float
    measured: dict[int, tuple[tuple[float, ...], Sizes]] = field(default_factory=dict)  #: c_l, and the sizes then
    layouts: dict[str, Sizes] = field(default_factory=dict)

    @property
    def uniform(self) -> int:
        """Return the widest code within the average: a tensor gets it while nothing is known of the tensor."""
        return max(width for width in WIDTHS if width <= self.bits)

    def allocation(self, sizes: Sizes | None) -> tuple[int, ...] | None:
        """Return the bits of each tensor, within the average. None: unknown."""
        measured = None if sizes is None else self.measured.get(len(sizes))
        if sizes is None or measured is None:
            return None
        # c_l is a sum over the tensor's values: a longer batch scales it
        c = tuple(c * d / max(size, 1) for c, d, size in zip(measured[0], sizes, measured[1], strict=True))
        return allocate(c, sizes, self.bits * sum(sizes), (*WIDTHS, EXACT))

    def state_dict(self) -> dict[str, Any]:
        return {"measured": dict(self.measured), "layouts": dict(self.layouts)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.measured, self.layouts = dict(state["measured"]), dict(state["layouts"])


@lru_cache(maxsize=64)  # of the kinds of input that training has
def allocate(sensitivities: tuple[float, ...], sizes: Sizes, budget: float, widths: tuple[int, ...]) -> tuple[int, ...]:
    """Minimise sum_l c_l S(b_l) subject to sum_l b_l D_l <= budget.

    All tensors start at the narrowest width; then the widening that lowers the variance most for each bit it costs is
    made, as long as one fits. With S convex in b that order is optimal up to the last widening that fits; O(L log L).

    Args:
        sensitivities: c_l; 0 leaves a tensor as narrow as the budget needs.
        sizes: D_l, values of each tensor.
        budget: bits for all together.
        widths: the bits a tensor may have, ascending.
    Returns:
        b_l for each tensor; all of the narrowest width where even that is over the budget.
    """
    bits = [widths[0]] * len(sizes)
    left = budget - sum(b * d for b, d in zip(bits, sizes, strict=True))

    def step(tensor: int, index: int) -> tuple[float, float, int, int]:
        here, there = widths[index], widths[index + 1]
        gain = sensitivities[tensor] * (factor(here) - factor(there)) / (sizes[tensor] * (there - here))
        # equal gains (no sensitivity at all, say): the narrowest first, so that the rest is spread evenly
        return (-gain, here, tensor, index)

    heap = [step(tensor, 0) for tensor in range(len(sizes)) if len(widths) > 1 and sizes[tensor]]
    heapq.heapify(heap)
    while heap:
        _, _, tensor, index = heapq.heappop(heap)
        cost = (widths[index + 1] - widths[index]) * sizes[tensor]
        if cost > left:
            continue
        left -= cost
        bits[tensor] = widths[index + 1]
        if index + 2 < len(widths):
            heapq.heappush(heap, step(tensor, index + 1))
    return tuple(bits)
