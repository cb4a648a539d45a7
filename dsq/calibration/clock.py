"""Seconds of a call, of its forward, of its backward."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark import Timer

#: of each timing; the median of the blocks in it counts
SECONDS = 0.05


def seconds(call: Callable[[], object]) -> float:
    """Of one call, with PyTorch's threads as they are; a GPU is waited for."""
    timer = Timer("call()", globals={"call": call}, num_threads=torch.get_num_threads())
    return float(timer.blocked_autorange(min_run_time=SECONDS).median)


def backward_seconds(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
    """Of the gradients of `inputs`, given those of `outputs`."""
    given = [torch.randn_like(output) for output in outputs]
    return seconds(lambda: torch.autograd.grad(outputs, inputs, given, retain_graph=True))
