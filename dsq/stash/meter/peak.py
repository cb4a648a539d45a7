"""The most memory that PyTorch's allocators held at once."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass
class PeakBytes:
    """Filled in when the measured stretch is over."""

    nbytes: int = 0


@contextmanager
def peak() -> Iterator[PeakBytes]:
    """The largest sum of live allocations made since entering, over the CPU and all CUDA devices.

    On the CPU from the allocation events of PyTorch's profiler, which are exact; the resident set is not,
    because freed memory stays with it. Where a CPU and a GPU allocate in turns the sum is an upper bound.
    """
    found = PeakBytes()
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() and torch.cuda.is_initialized() else ()
    before = {}
    for device in devices:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before[device] = torch.cuda.memory_allocated(device)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it would announce every start and stop on stderr
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        yield found
    live = 0
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.device_type() == torch._C._autograd.DeviceType.CPU:
            live += event.nbytes()
            found.nbytes = max(found.nbytes, live)
    for device in devices:
        found.nbytes += torch.cuda.max_memory_allocated(device) - before[device]
