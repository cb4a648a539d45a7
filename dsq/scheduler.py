"""When to raise the precision: at a plateau of the validation loss (DSQ, section 6), or after given updates."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from fractions import Fraction
from numbers import Real
from typing import Any

import torch
from torch import Tensor, distributed

from dsq.arguments import number, whole_number
from dsq.precision import Level, Precision, RiseAt, parse_levels, parse_rise_at


@dataclass(slots=True)
class Work:
    """The work done at one level."""

    updates: int = 0
    tokens: int = 0


def updates_left(total: int | None, before: int) -> int | None:
    """Return the updates of a run after the first ``before``, at least one; ``total`` itself if it is None or 0."""
    return total and max(total - before, 1)


def check_plateau(patience: int, threshold: float) -> None:
    """Raise ValueError where a plateau cannot be told by these."""
    whole_number("patience", patience, 1)
    number("threshold", threshold, least=0, below=1)


class PrecisionScheduler:
    """Moves to the next level when the validation loss has not improved for ``patience`` validations; never back.

    A loss improves that is lower than the best by more than ``threshold`` times the best. With ``rise_at`` the updates
    alone decide, as ``record`` counts them: a plateau's moment hangs on chance.

    The best loss and the count start afresh at each level: losses at different precisions are not comparable. The cost
    of a DSQ run is the work-weighted mean of its levels' costs, so the work done at each level is recorded.

    Args:
        levels: the schedule, lowest first; no width may decrease. A string or Precision stands for one level.
        patience: validations without improvement before the next level.
        threshold: least relative improvement, 0 or more and below 1; 0 takes the slightest for one.
        rise_at: updates after which each level but the first begins, or fractions of ``total_updates``; none: at
            plateaus.
        total_updates: of the run.
    Raises:
        ValueError: an empty or decreasing schedule, a patience under 1, a threshold out of range, a rise_at that does
            not fit the levels, or fractions without total_updates.
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
            # as decimals: in floats 0.07 of 100 updates is more than 7
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
        self.work = [Work() for _ in self.levels]

    @property
    def precision(self) -> Precision:
        return self.levels[self.level]

    @property
    def updates(self) -> int:
        """Return the updates recorded so far, over all levels."""
        return sum(work.updates for work in self.work)

    def step(self, loss: float | Tensor) -> bool:
        """Take note of a validation loss; True if the level rose. Warns of NaN and infinities: they improve nothing.

        Where torch.distributed runs, every process must call it: the mean of their losses decides for all.
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
        """Count work done at the present level; a count may be a tensor, as of ``mask.sum()``. True if the level rose,
        as ``rise_at`` says.

        Raises ValueError where a count is no whole number or under 0.
        """
        updates, tokens = whole_number("updates", _scalar(updates), 0), whole_number("tokens", _scalar(tokens), 0)
        self.work[self.level].updates += updates
        self.work[self.level].tokens += tokens
        before = self.level
        while self.level < len(self.rise_at) and self.updates >= self.rise_at[self.level]:
            self.level += 1
        return self.level > before

    def state_dict(self) -> dict[str, Any]:
        """Return everything a resumed run needs to go on as an unbroken one would."""
        return {
            "levels": [precision.as_json() for precision in self.levels],
            "level": self.level,
            "best": self.best if math.isfinite(self.best) else None,  # JSON has no infinity
            "validations_without_improvement": self.validations_without_improvement,
            "work": [(work.updates, work.tokens) for work in self.work],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``. Raises ValueError where it is no scheduler's, or belongs to another schedule."""
        expected = self.state_dict()
        if not isinstance(state, dict) or set(state) != set(expected):
            got = list(state) if isinstance(state, dict) else repr(state)
            raise ValueError(f"state of the scheduler must have the keys {sorted(expected)}, got {got}")
        if state["levels"] != expected["levels"]:
            raise ValueError(f"levels must be those of the checkpoint, {state['levels']}, got {expected['levels']}")
        self.level = whole_number("level", state["level"], 0, len(self.levels) - 1)
        self.validations_without_improvement, self.work = (
            state["validations_without_improvement"],
            [Work(*it) for it in state["work"]],
        )
        self.best = math.inf if state["best"] is None else state["best"]

    def history(self) -> dict[str, Any]:
        """Return the work at each level, as plain data."""
        worked = zip(self.levels, self.work, strict=True)
        return {"levels": [{"precision": level.as_json(), **asdict(work)} for level, work in worked]}


def _mean_over_processes(loss: float) -> float:
    """Return the mean of what each process of the default group has; ``loss`` where there is one."""
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
        return loss
    device = "cuda" if distributed.get_backend() == "nccl" else "cpu"
    total = torch.tensor(loss, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return float(total) / distributed.get_world_size()


def _scalar(value: Any) -> Any:
    """Return the number in a tensor or array of one: a tensor has a graph, would change in saved states, is no JSON."""
    return value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value
