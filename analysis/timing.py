"""How anything here is timed: calls take turns in one process, and contestants are ratios to a baseline.

A machine that slows down slows them all. A ratio is the median over the rounds of (a contestant's time / the
baseline's time in that round). The baseline is timed twice a round, the second time as a contestant: how far its ratio
deviates from 1 is the noise of all ratios.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

Call = Callable[[], object]
#: (call, repeats) -> seconds a call
Clock = Callable[[Call, int], float]
#: a turn repeats its call until it takes about this long, so that the clock's own cost does not count
TURN_SECONDS = 0.004
#: ratios are not to be trusted where the baseline deviates further than this from itself
TRUSTED_SPREAD = 0.1


def _clock(now: Callable[[], float]) -> Clock:
    def clock(call: Call, repeats: int) -> float:
        start = now()
        for _ in range(repeats):
            call()
        return (now() - start) / repeats

    return clock


#: as the host sees them; of this process's CPU time
wall_clock, cpu_clock = _clock(time.perf_counter), _clock(time.process_time)


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


@dataclass(frozen=True, slots=True)
class Comparison:
    """Contestants beside a baseline, a row each: the baseline's own first, and last the baseline again, against itself.

    ``best/best``: best time / the baseline's best, the steadier figure on a busy machine. ``stray``: half the
    interquartile range of the ratios, relative to their median.
    """

    title: str
    baseline: str
    rows: list[dict[str, Any]]

    @property
    def trusted(self) -> bool:
        """Whether the baseline strayed little from itself."""
        again = self.rows[-1]
        return max(abs(again["ratio"] - 1), again["stray"]) <= TRUSTED_SPREAD


def compare(title: str, baseline: tuple[str, Call], contestants: Mapping[str, Call], rounds: int) -> Comparison:
    """Time every contestant beside the baseline, ``rounds`` times."""
    name, base = baseline
    seconds = in_turns({name: base, **contestants, f"{name} again": base}, rounds)
    return Comparison(title, name, [_row(who, spent, seconds[name]) for who, spent in seconds.items()])


def _row(contestant: str, seconds: list[float], baseline: list[float]) -> dict[str, Any]:
    low, ratio, high = quantiles([duration / base for duration, base in zip(seconds, baseline, strict=True)], n=4)
    times = {"ms": 1000 * median(seconds), "ratio": ratio, "best/best": min(seconds) / min(baseline)}
    return {"contestant": contestant, **times, "stray": (high - low) / 2 / ratio}
