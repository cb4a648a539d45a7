"""The GPU kernels, on a GPU and without one, where Triton's interpreter proves results and says nothing of time.

``python -m analysis.gpu.check`` runs the trials of each part on a machine.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import torch

from analysis.timing import Call, gpu_clock, in_turns, wall_clock
from dsq.command import Record


class Trial(NamedTuple):
    """One thing to be tried, which gives a row of the part's table."""

    name: str
    call: Callable[[], Record]


#: calls that are timed together on a GPU
REPEATS = 5


class Machine(NamedTuple):
    """The device, and how a call is timed on it."""

    name: str
    device: torch.device

    @property
    def is_gpu(self) -> bool:
        """Whether sizes are to be full; else tiny."""
        return self.device.type == "cuda"

    def milliseconds(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """The median of each call, which take turns."""
        return self._medians(calls, REPEATS if self.is_gpu else 1)

    def device_milliseconds(self, calls: Mapping[str, Call]) -> dict[str, float]:
        """``milliseconds``, but without the host's part, which takes longer than a small kernel: a turn is one replay
        of a CUDA graph of REPEATS calls."""
        if not self.is_gpu:
            return self.milliseconds(calls)
        durations = self._medians({name: captured([call] * REPEATS).replay for name, call in calls.items()}, 1)
        return {name: time / REPEATS for name, time in durations.items()}

    def _medians(self, calls: Mapping[str, Call], repeats: int) -> dict[str, float]:
        rounds, warm, clock = (9, 2, gpu_clock) if self.is_gpu else (1, 0, wall_clock)
        seconds = in_turns(calls, rounds, repeats, warm, clock)
        return {name: 1000 * median(durations) for name, durations in seconds.items()}


def captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    """The calls as a CUDA graph, after one round of them outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def this_machine() -> Machine:
    """The GPU if there is one."""
    if torch.cuda.is_available():
        return Machine(torch.cuda.get_device_name(), torch.device("cuda"))
    return Machine("not run on a GPU (Triton's interpreter on the CPU)", torch.device("cpu"))
