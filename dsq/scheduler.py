"""Raise the precision at a plateau of the validation loss (DSQ, section 6), or after a number of updates."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import torch
from torch import Tensor, distributed

from dsq.arguments import check_keys, number, whole_number
from dsq.precision import Level, Precision, RiseAt, parse_levels, parse_rise_at


@dataclass(slots=True)
class LevelWork:
    """The work done at one level."""

    updates: int = 0
    tokens: int = 0


def updates_left(total: int | None, before: int) -> int | None:
    """Return the updates of a run after the first ``before``, at least one; ``total`` itself if it is None or 0."""
    return total and max(total - before, 1)


def check_plateau(patience: int, threshold: float) -> None:
    """Raise ValueError if ``patience`` or ``threshold`` is out of range."""
    whole_number("patience", patience, 1)
    number("threshold", threshold, least=0, below=1)


class PrecisionScheduler:
    """The current level of a schedule: it rises at plateaus of the validation loss, and never falls.

    A plateau is ``patience`` validations without improvement. A loss improves if it is lower than the best by more than
    ``threshold`` times the best. If ``rise_at`` is given, the number of updates alone decides, as ``record`` counts
    them: the moment of a plateau depends on chance.

    The best loss and the count of validations restart at each level, because losses at different precisions are not
    comparable. The cost of a run is the mean of its levels' costs, weighted by the work at each level, so that work is
    recorded.

    Args:
        levels: the schedule, lowest level first; no width may decrease. A text or a Precision is one level.
        patience: validations without improvement before the next level.
        threshold: least relative improvement, from 0 and below 1; at 0 the slightest counts.
        rise_at: updates after which each level but the first begins, or fractions of ``total_updates``; empty: at
            plateaus.
        total_updates: of the run.
    Raises:
        ValueError: an empty or decreasing schedule; ``patience`` under 1; ``threshold`` out of range; a ``rise_at``
            that does not fit the levels, or has fractions without ``total_updates``.
    """

    def __init__(
        self,
        levels: Level | Iterable[Level],
        patience: int = 5,
        threshold: float = 0.0,
        rise_at: RiseAt = (),
        total_updates: int | None = None,
    ) -> None:
        self.levels = parse_levels(levels)
        self.rise_at = parse_rise_at(rise_at, len(self.levels))
        if total_updates is not None:
            total_updates = whole_number("total_updates", total_updates, 1)
        if any(moment < 1 for moment in self.rise_at):
            if total_updates is None:
                text = f"total_updates must be given for rise_at in fractions of the run, {self.rise_at}"
                raise ValueError(f"{text}; a run without an end takes rise_at in updates")
            # as decimals, because in floats 0.07 of 100 updates is more than 7
            self.rise_at = tuple(math.ceil(Fraction(str(moment)) * total_updates) for moment in self.rise_at)
        if total_updates is not None and self.rise_at and self.rise_at[-1] >= total_updates:
            text = f"rise_at: the run has {total_updates} updates, and none after {self.rise_at[-1]}: no level follows"
            warnings.warn(text, stacklevel=2)
        check_plateau(patience, threshold)
        self.patience = patience
        self.threshold = threshold
        self.level = 0
        self.best = math.inf
        self.validations_without_improvement = 0  #: validations since the loss last improved
        self.work = [LevelWork() for _ in self.levels]

    @property
    def precision(self) -> Precision:
        return self.levels[self.level]

    @property
    def updates(self) -> int:
        """Return the updates recorded so far, over all levels."""
        return sum(work.updates for work in self.work)

    def step(self, loss: float | Tensor) -> bool:
        """Record a validation loss. Return whether the level rose. Warns of NaN and infinities, which improve nothing.

        Under torch.distributed every process must call it: the mean of their losses decides for all.
        """
        if self.rise_at:
            return False
        value = _scalar(loss)
        if not isinstance(value, Real):
            raise TypeError(f"loss must be a number, got {loss!r}")
        loss = _mean_over_processes(float(value))
        if not math.isfinite(loss):
            text = f"the validation loss is {loss} at {self.precision}: it is no improvement"
            warnings.warn(f"{text}; look at the training, more bits may not fix it", stacklevel=3)
        margin = self.threshold * abs(self.best) if math.isfinite(self.best) else 0.0
        if math.isfinite(loss) and loss < self.best - margin:
            self.best, self.validations_without_improvement = loss, 0
            return False
        self.validations_without_improvement += 1
        if self.validations_without_improvement < self.patience or self.level + 1 == len(self.levels):
            return False
        self.level += 1
        self.best, self.validations_without_improvement = math.inf, 0
        return True

    def record(self, updates: int | Tensor = 1, tokens: int | Tensor = 0) -> bool:
        """Count work done at the present level. Return whether the level rose, by ``rise_at``.

        A count may be a tensor, such as ``mask.sum()``. Raises ValueError if one is no whole number from 0.
        """
        updates, tokens = whole_number("updates", _scalar(updates), 0), whole_number("tokens", _scalar(tokens), 0)
        self.work[self.level].updates += updates
        self.work[self.level].tokens += tokens
        before = self.level
        while self.level < len(self.rise_at) and self.updates >= self.rise_at[self.level]:
            self.level += 1
        return self.level > before

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, as data for JSON."""
        return {
            "levels": [precision.as_json() for precision in self.levels],
            "level": self.level,
            "best": self.best if math.isfinite(self.best) else None,  # JSON has no infinity
            "validations_without_improvement": self.validations_without_improvement,
            "work": [(work.updates, work.tokens) for work in self.work],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``. Raises ValueError if it is not a scheduler's, or of another schedule."""
        expected = self.state_dict()
        check_keys("state of the scheduler", state, expected)
        if parse_levels(state["levels"]) != self.levels:
            raise ValueError(f"levels must be those of the checkpoint, {state['levels']}, got {expected['levels']}")
        if len(state["work"]) != len(self.levels):
            raise ValueError(f"work must be one entry per level, {len(self.levels)}, got {len(state['work'])}")
        level = whole_number("level", state["level"], 0, len(self.levels) - 1)
        count = state["validations_without_improvement"]
        self.validations_without_improvement = whole_number("validations_without_improvement", count, 0)
        self.level = level
        self.work = [LevelWork(*counts) for counts in state["work"]]
        self.best = math.inf if state["best"] is None else state["best"]

    def history(self) -> dict[str, Any]:
        """Return the work at each level, as plain data."""
        levels = zip(self.levels, self.work, strict=True)
        return {"levels": [{"precision": level.as_json(), **asdict(work)} for level, work in levels]}


def _mean_over_processes(loss: float) -> float:
    """Return the mean of ``loss`` over the processes of the default group."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return loss
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    total = torch.tensor(loss, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


def _scalar(value: Any) -> Any:
    """Return the number in a tensor or array of one value, which JSON cannot hold."""
    return value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value
