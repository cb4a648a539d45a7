"""How many seconds a call takes, or a backward."""

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.benchmark import Timer
from torch.utils.benchmark.utils.timer import timer as wall_clock

#: that a timing lasts; its quickest block of calls counts, since other work on the machine only slows
SECONDS = 0.05


def seconds(call: Callable[[], object]) -> float:
    """Seconds of one ``call``, with PyTorch's threads as they are; a GPU is waited for.

    They are wall time; on one thread of a machine without a GPU CPU time, which other work on the machine does not
    stretch.
    """
    threads = torch.get_num_threads()
    clock = time.process_time if threads == 1 and not torch.cuda.is_available() else wall_clock
    timer = Timer("call()", timer=clock, globals={"call": call}, num_threads=threads)
    return min(timer.blocked_autorange(min_run_time=SECONDS).times)


def backward_seconds(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> float:
    """Seconds of computing the gradients of ``inputs`` from those of ``outputs``."""
    given = [torch.randn_like(output) for output in outputs]
    return seconds(lambda: torch.autograd.grad(outputs, inputs, given, retain_graph=True))
