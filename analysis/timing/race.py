"""Contestants timed in turns against a baseline.

A ratio is the median over the rounds of (a contestant's time / the baseline's time in that round). The baseline is
timed twice a round, the second time as a contestant: how far that ratio strays from 1 is the noise of all ratios.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median, quantiles

from analysis.timing.timer import Call, in_turns

#: ratios are not to be trusted where the baseline strays further than this from itself
TRUSTED_STRAY = 0.1


@dataclass(frozen=True, slots=True)
class RaceResult:
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
        """Its best time / the baseline's best: the steadier figure on a busy machine."""
        return min(self.seconds) / min(self.baseline)

    @property
    def median_seconds(self) -> float:
        return median(self.seconds)

    @property
    def stray(self) -> float:
        """Half the interquartile range of the ratios, relative to their median."""
        low, _, high = quantiles(self.ratios, n=4)
        return (high - low) / 2 / self.ratio


@dataclass(frozen=True, slots=True)
class Race:
    """All results of a race, the baseline's own first; and the baseline against itself."""

    title: str
    baseline: str
    results: tuple[RaceResult, ...]
    control: RaceResult

    @property
    def stray(self) -> float:
        """How far the baseline strayed from itself."""
        return max(abs(self.control.ratio - 1), self.control.stray)

    @property
    def trusted(self) -> bool:
        return self.stray <= TRUSTED_STRAY


def race(title: str, baseline: tuple[str, Call], contestants: Mapping[str, Call], rounds: int) -> Race:
    """Time every contestant beside the baseline, ``rounds`` times."""
    name, base = baseline
    calls = {name: base, **contestants, f"{name} again": base}
    seconds = in_turns(calls, rounds)
    base_seconds = tuple(seconds[name])
    results = [RaceResult(who, tuple(spent), base_seconds) for who, spent in seconds.items()]
    return Race(title, name, tuple(results[:-1]), results[-1])
