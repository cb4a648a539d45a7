"""Every configuration in a range at once, and those where no bit is free.

Cost alone always prefers fewer bits, and no formula here says what a bit is worth (`dsq-cost cheapest` takes accuracy
from runs). What costs can say: where one more bit at one of q0..q3 costs nothing, it may as well be there.
"""

import re
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from costmodel.hardware.hardware import Hardware
from costmodel.model.estimate import REFERENCE, evaluate
from costmodel.model.operations import Workload
from costmodel.model.quantisation import PrecisionGrid, Setup
from dsq.formats import NARROWEST, WIDEST

#: what a configuration costs; all are better when smaller
OBJECTIVES = ("dram", "arithmetic", "stash", "time")
Column = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def parse_range(text: str) -> list[int]:
    """'2:16', '2:16,32' or '4' -> widths. Raises ValueError."""
    widths: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\s*:\s*(\d+))?\s*", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
        if not NARROWEST <= first <= last <= WIDEST:
            raise ValueError(f"range must be widths in {NARROWEST}..{WIDEST} such as 4, 2:8 or 2:16,32, got {text!r}")
        widths.update(range(first, last + 1))
    return sorted(widths)


def grid(ranges: Sequence[Sequence[int]]) -> PrecisionGrid:
    """All combinations of the four ranges."""
    return PrecisionGrid(*(axis.ravel() for axis in np.meshgrid(*map(np.array, ranges), indexing="ij")))


def sweep(workload: Workload, setup: Setup, hardware: Hardware, relative_to: Setup = REFERENCE) -> dict[str, Column]:
    """OBJECTIVES of each configuration of the setup's precision grid: dram and arithmetic relative to a setup,
    stash in bytes, time in seconds."""
    estimate, reference = (evaluate(workload, costed, hardware) for costed in (setup, relative_to))
    columns = {
        "dram": estimate.dram_bytes / reference.dram_bytes,
        "arithmetic": estimate.arithmetic / reference.arithmetic,
        "stash": estimate.stash_bytes,
        "time": estimate.total.seconds,
    }
    shape = np.shape(setup.precision.q0)
    return {name: np.broadcast_to(np.asarray(column, dtype=float), shape) for name, column in columns.items()}


def front(precision: PrecisionGrid, costs: Sequence[Column]) -> Mask:
    """Mask of the configurations of a `grid` where the next width of the grid, at any one of q0..q3, costs more in at
    least one of ``costs``."""
    shape = [len(np.unique(widths)) for widths in precision]
    kept = np.ones(shape, dtype=bool)
    for axis in range(len(shape)):
        here, there = (tuple(part if i == axis else slice(None) for i in range(len(shape))) for part in _PARTS)
        more = [column.reshape(shape)[there] > column.reshape(shape)[here] for column in costs]
        kept[here] &= np.logical_or.reduce(more)
    return kept.ravel()


#: of an axis: all but its last, all but its first
_PARTS = (slice(None, -1), slice(1, None))
