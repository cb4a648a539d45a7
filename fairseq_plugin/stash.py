"""How many bytes the converted linears really keep between forward and backward."""

import contextlib
from collections import Counter
from collections.abc import Iterator
from typing import Any

from torch import nn

import dsq
from dsq.stash.observation import Observation

#: the stash of some training steps, summed up; a tensor that several layers share counts once:
#: stash_bytes, the storages that the converted linears keep for their backward; stash_bytes_fp32, what plain linears
#: would have saved of the same inputs, 4 bytes a value; linears_called, converted linears that ran; steps, how many
Measured = Counter[str]
#: one training step of so many is measured, at each level: a batch is no sample of a corpus
EVERY = 16


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
    found = {"stash_bytes": seen.nbytes, "stash_bytes_fp32": seen.input_bytes, "linears_called": seen.layers}
    levels[level].update({**found, "steps": 1})


def history(scheduler: dsq.PrecisionScheduler, found: list[Measured]) -> list[dict[str, Any]]:
    """The work at each level, as ``scheduler.history`` has it, with the mean of the stash ``found`` there a step."""
    levels = scheduler.history()["levels"]
    return [{**level, **_mean(one)} for level, one in zip(levels, found, strict=True)]


def _mean(found: Measured) -> dict[str, int]:
    """Nothing where no step was measured."""
    steps = found["steps"]
    each = ("stash_bytes", "stash_bytes_fp32", "linears_called")
    return {**{name: round(found[name] / steps) for name in each}, "stash_steps": steps} if steps else {}
