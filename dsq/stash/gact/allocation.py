"""Bits for each tensor under a budget: GACT's integer program (equation 4), solved greedily."""

import heapq
from collections.abc import Callable, Sequence


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
