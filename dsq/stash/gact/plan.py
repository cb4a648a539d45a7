"""How many bits each saved tensor gets: what GACT knows of a model's tensors, and the integer program (equation 4) that
gives bits under a budget, solved greedily."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from dsq.stash.gact.codecs import EXACT, CodeFamily

Sizes = tuple[int, ...]  #: values of each tensor that one kind of input makes the model save, in order


@dataclass(frozen=True)
class Sensitivities:
    """Sensitivities c_l of the tensors of a forward, and the sizes those had."""

    c: tuple[float, ...]
    sizes: tuple[int, ...]


@dataclass
class BitPlan:
    """The average, the code, and what was measured: sensitivities by number of tensors, layouts by key of input."""

    bits: float
    family: CodeFamily
    measured: dict[int, Sensitivities] = field(default_factory=dict)
    layouts: dict[str, Sizes] = field(default_factory=dict)
    #: allocations by layout, and what they were made of
    _allocated: dict[Sizes, tuple[Sensitivities, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def uniform(self) -> int:
        """The widest code within the average: a tensor gets it while nothing is known of the tensor."""
        return max(width for width in self.family.widths if width <= self.bits)

    def factor(self, bits: int) -> float:
        """S(b); 0 for a tensor kept as it is."""
        return 0.0 if bits == EXACT else self.family.factor(bits)

    def complete(self) -> bool:
        """Whether the sensitivities of all known layouts were measured."""
        return all(len(sizes) in self.measured for sizes in self.layouts.values())

    def allocation(self, sizes: Sizes | None) -> tuple[int, ...] | None:
        """Bits of each tensor, within the average. None: unknown."""
        measured = None if sizes is None else self.measured.get(len(sizes))
        if sizes is None or measured is None:
            return None
        made_of, bits = self._allocated.get(sizes, (None, ()))
        if made_of is not measured:
            # c_l is a sum over the tensor's values: a longer batch scales it
            c = [c * d / max(size, 1) for c, d, size in zip(measured.c, sizes, measured.sizes, strict=True)]
            bits = allocate(c, sizes, self.bits * sum(sizes), (*self.family.widths, EXACT), self.factor)
            self._allocated[sizes] = measured, bits
        return bits

    def variance(self, sizes: Sizes) -> float:
        """V(b) of equation 5 at the allocation of measured sizes."""
        measured, bits = self.measured[len(sizes)], self.allocation(sizes) or ()
        return sum(c * self.factor(b) for c, b in zip(measured.c, bits, strict=True))

    def state_dict(self) -> dict[str, Any]:
        return {
            "measured": {count: asdict(measured) for count, measured in self.measured.items()},
            "layouts": dict(self.layouts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.measured = {count: Sensitivities(**measured) for count, measured in state["measured"].items()}
        self.layouts = {key: tuple(sizes) for key, sizes in state["layouts"].items()}


def allocate(
    sensitivities: Sequence[float],
    sizes: Sequence[int],
    budget: float,
    widths: Sequence[int],
    factor: Callable[[int], float],
) -> tuple[int, ...]:
    """Minimise sum_l c_l S(b_l) subject to sum_l b_l D_l <= budget.

    All tensors start at the narrowest width; then the widening that lowers the variance most for each bit it costs is
    made, as long as one fits. With S convex in b that order is optimal up to the last widening that fits; O(L log L).

    Args:
        sensitivities: c_l; 0 leaves a tensor as narrow as the budget needs.
        sizes: D_l, values of each tensor.
        budget: bits for all together.
        widths: the bits a tensor may have, ascending.
        factor: S(b).
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
