"""The one timer: calls take turns, so that a machine that slows down slows them all."""

import time
from collections.abc import Callable, Mapping

Call = Callable[[], object]
#: (call, repeats) -> seconds a call
Clock = Callable[[Call, int], float]
#: a turn repeats its call until it takes about this long, so that the clock's own cost does not count
TURN_SECONDS = 0.004


def wall_clock(call: Call, repeats: int) -> float:
    """Seconds a call as the host sees them."""
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats


def cpu_clock(call: Call, repeats: int) -> float:
    """Seconds of this process's CPU time a call."""
    start = time.process_time()
    for _ in range(repeats):
        call()
    return (time.process_time() - start) / repeats


def host_clock() -> Clock:
    """The wall's; but on one thread the CPU's, which what else runs on the machine does not stretch."""
    import torch

    return cpu_clock if torch.get_num_threads() == 1 else wall_clock


def gpu_clock(call: Call, repeats: int) -> float:
    """Seconds a call between two events on the GPU, which need not wait for the host between the calls."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / repeats


def in_turns(
    calls: Mapping[str, Call], rounds: int, repeats: int | None = None, warm: int = 1, clock: Clock | None = None
) -> dict[str, list[float]]:
    """Seconds a call, ``rounds`` times each. Every call runs once a round, every other round in reverse order.

    ``repeats``: calls of a turn; None chooses, a call at a time, what fills TURN_SECONDS. ``warm``: rounds that do not
    count, before the others. ``clock``: None takes host_clock().
    """
    clock = clock or host_clock()
    for _ in range(warm):
        for call in calls.values():
            clock(call, repeats or 1)
    number = {name: repeats or max(1, round(TURN_SECONDS / max(clock(call, 1), 1e-7))) for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name in reversed(number) if turn % 2 else number:
            seconds[name].append(clock(calls[name], number[name]))
    return seconds
