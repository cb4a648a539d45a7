"""Timing by turns: every contestant runs once a round, so that a machine that slows down slows them all.

A ratio is the median over the rounds of (its time / the baseline's time in that round). The baseline also runs a second
time each round, as a contestant of its own: how far that ratio strays from 1 is how far any ratio here may stray.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median, quantiles

#: a turn repeats its call until it takes about this long, so that the clock's own cost does not count
TURN_SECONDS = 0.004
#: beyond this stray of the baseline from itself, ratios are not to be trusted
TRUSTED_STRAY = 0.1

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Result:
    """One contestant's times, in seconds a call, beside the baseline's of the same rounds."""

    name: str
    seconds: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def ratios(self) -> list[float]:
        return [mine / base for mine, base in zip(self.seconds, self.baseline, strict=True)]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    @property
    def best_ratio(self) -> float:
        """Its best time by the baseline's best: what is left to go by on a busy machine."""
        return min(self.seconds) / min(self.baseline)

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def stray(self) -> float:
        """Half of the middle half's width, relative to the median ratio."""
        low, _, high = quantiles(self.ratios, n=4)
        return (high - low) / 2 / self.ratio


@dataclass(frozen=True, slots=True)
class Race:
    """All results of a race, the baseline's own first; and the baseline against itself."""

    title: str
    baseline: str
    results: tuple[Result, ...]
    control: Result

    @property
    def stray(self) -> float:
        """How far the baseline strayed from itself."""
        return max(abs(self.control.ratio - 1), self.control.stray)

    @property
    def trusted(self) -> bool:
        return self.stray <= TRUSTED_STRAY


def race(title: str, baseline: tuple[str, Call], contestants: Mapping[str, Call], rounds: int) -> Race:
    """Run every contestant once a round, after the baseline, ``rounds`` times (after one round that does not count)."""
    name, base = baseline
    calls = {name: base, **contestants, f"{name} again": base}
    repeats = {who: _repeats(call) for who, call in calls.items()}
    seconds: dict[str, list[float]] = {who: [] for who in calls}
    for _ in range(rounds):
        for who, call in calls.items():
            seconds[who].append(_turn(call, repeats[who]))
    base_seconds = tuple(seconds[name])
    results = [Result(who, tuple(spent), base_seconds) for who, spent in seconds.items()]
    return Race(title, name, tuple(results[:-1]), results[-1])


def _repeats(call: Call) -> int:
    call()
    return max(1, round(TURN_SECONDS / max(_turn(call, 1), 1e-7)))


def _turn(call: Call, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - start) / repeats
