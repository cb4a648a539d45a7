"""How many bytes the converted linears really keep between forward and backward."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any

from torch import nn

import dsq
from dsq.stash.observation import Observation

#: one training step of so many is measured, at each level: a batch is no sample of a corpus
EVERY = 16


@dataclass
class Measured:
    """The stash of training steps, summed up. A tensor that several layers share counts once, in both numbers."""

    stash_bytes: int = 0  #: the storages that the converted linears keep for their backward
    stash_bytes_fp32: int = 0  #: what plain linears would have saved of the same inputs: the inputs, 4 bytes a value
    linears_called: int = 0  #: converted linears that ran
    steps: int = 0  #: training steps that were measured

    def __add__(self, other: "Measured") -> "Measured":
        return Measured(*(getattr(self, it.name) + getattr(other, it.name) for it in fields(Measured)))

    def mean(self) -> dict[str, int]:
        """The numbers a step, for the record of a run; nothing where no step was measured."""
        if not self.steps:
            return {}
        each = ("stash_bytes", "stash_bytes_fp32", "linears_called")
        return {**{name: round(getattr(self, name) / self.steps) for name in each}, "stash_steps": self.steps}


@contextlib.contextmanager
def sampled(levels: list[Measured], scheduler: dsq.PrecisionScheduler, model: nn.Module) -> Iterator[None]:
    """Measure the training step within the block, one of EVERY, and add it to its level's of ``levels``.

    The graph of each converted linear is weighed right after its forward. Parameters are no stash.
    """
    level = scheduler.level
    if scheduler.work[level].updates % EVERY:
        yield
        return
    seen = Observation(model, once=False)
    try:
        yield
    finally:
        seen.end()
    levels[level] += Measured(seen.nbytes, seen.input_bytes, seen.layers, 1)


def history(scheduler: dsq.PrecisionScheduler, found: list[Measured]) -> list[dict[str, Any]]:
    """The work at each level, as ``scheduler.history`` has it, with the stash ``found`` there."""
    levels = scheduler.history()["levels"]
    return [{**level, **one.mean()} for level, one in zip(levels, found, strict=True)]
