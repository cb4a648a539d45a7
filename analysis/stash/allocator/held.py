"""Bytes that the allocator holds between forward and backward, and at the peak of a step."""

import gc
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from analysis.stash.allocator.counted import Count

#: steps before the one that is counted: caches, estimates and gradients exist after them
WARM = 2


@dataclass(frozen=True)
class HeldBytes:
    """One step, above what is held between steps; the batch and the gradients are there before it."""

    stash: int  #: at the end of the forward, while the loss is alive
    peak: int  #: the most during forward and backward
    left: int  #: after the step: what it did not give back


def step_bytes(forward: Callable[[], Tensor], warm: int = WARM) -> HeldBytes:
    """Count one step, ``forward().backward()``, of a counted process (CPU).

    forward: makes the loss of a batch that exists already. Gradients stay between the steps.
    """
    count = Count()
    for _ in range(warm):
        forward().backward()
    gc.collect()
    gc.disable()
    try:
        before = count.live()
        count.reset_peak()
        loss = forward()
        stash = count.live() - before
        loss.backward()
        peak = count.peak() - before
        del loss
    finally:
        gc.enable()
    gc.collect()
    return HeldBytes(stash, peak, count.live() - before)
