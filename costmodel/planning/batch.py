"""How large the batch may be."""

from collections.abc import Callable

from costmodel.model.memory import Memory, Method, peak_memory
from costmodel.model.operations import Workload

MOST_SEQUENCES = 2**20
#: from one batch that is tried to the next, until one does not fit
GROWTH = 6


def largest_batch(build: Callable[[int], Workload], method: Method, budget: float) -> int:
    """The most sequences a device whose step fits the budget; 0: not even one."""
    low, high = 0, MOST_SEQUENCES + 1  # this fits, this does not
    tried, size = 0, 1
    found: dict[int, Memory] = {}
    while high - low > 1:
        found[size] = peak_memory(build(size), method)
        low, high = (size, high) if found[size].peak <= budget else (low, size)
        guess = _reaching(budget, tried, found[tried], size, found[size]) if tried else size * GROWTH
        tried, size = size, min(max(guess, low + 1), high - 1)
    return low


def _reaching(budget: float, tried: int, before: Memory, size: int, now: Memory) -> int:
    """The batch whose peak is the budget if each moment's memory grows in a straight line, as it does but for
    rounding."""
    slopes = (now.totals - before.totals) / (size - tried)
    grows = slopes > 0
    more = (budget - now.totals[grows]) // slopes[grows]
    return min(MOST_SEQUENCES, size + int(more.min(initial=MOST_SEQUENCES)))
