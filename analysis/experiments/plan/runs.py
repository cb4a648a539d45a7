"""The runs of an experiment: its grids multiplied out, each run with a name, its flags and its cost to be expected."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from analysis.experiments import finetune, glue, translate
from analysis.experiments.plan.experiment import Experiment, RunGrid, Scalar
from analysis.experiments.training.flags import FLOAT

#: kind of the data -> what checks the flags of a training on them
_CHECKS = {
    "generated": translate.check_flags,
    "parallel": translate.check_flags,
    "labelled": glue.check_flags,
    "finetuning": finetune.check_flags,
}


@dataclass(frozen=True)
class PlannedRun:
    name: str  #: of its folder; unique in the experiment
    label: str
    paper: float | None
    options: dict[str, Scalar]  #: fields of DSQConfig; levels as text
    seed: int
    training: dict[str, Scalar]  #: dsq-train's flags

    @property
    def levels(self) -> str:
        return str(self.options["levels"])

    @property
    def max_update(self) -> int:
        """Updates in all; 0 where epochs alone bound the run."""
        return int(self.training.get("max-update", 0))

    @property
    def flags(self) -> list[str]:
        """dsq-train's, but for --dsq-levels."""
        dsq = {} if self.levels == FLOAT else {k: v for k, v in self.options.items() if k != "levels"}
        named = {**self.training, "seed": self.seed, **{f"dsq-{k.replace('_', '-')}": v for k, v in dsq.items()}}
        return [word for flag, value in named.items() for word in _words(flag, value)]


def plan(experiment: Experiment, only: list[str] | None = None) -> list[PlannedRun]:
    """Its runs, every grid's first seed first; those whose names match a glob of ``only``. Raises ValueError where none
    matches one of these, or two runs have one name."""
    runs = [run for grid in experiment.runs for run in _multiplied(experiment, grid)]
    seeds = list(dict.fromkeys(run.seed for run in runs))
    runs.sort(key=lambda run: seeds.index(run.seed))
    names = [run.name for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"runs: two of them are {min(twice)}; a label tells apart what differs in training alone")
    for pattern in only or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"--only {pattern}: matches no run; the first is {names[0]}")
    return [run for run in runs if not only or any(fnmatchcase(run.name, pattern) for pattern in only)]


def check(experiment: Experiment, runs: list[PlannedRun]) -> None:
    """Raise ValueError, naming the run, where its training could not be given its flags."""
    check_flags = _CHECKS[experiment.data.kind]
    seen = set()
    for run in runs:
        key = str((run.options, run.training))
        if key not in seen:
            seen.add(key)
            try:
                check_flags(run.levels, run.flags)
                _check_length(experiment, run)
            except ValueError as error:
                raise ValueError(f"run {run.name}: {error}") from None


def _check_length(experiment: Experiment, run: PlannedRun) -> None:
    """Raise ValueError where epochs that nobody gave would end the run before its updates, or nothing ends it."""
    epochs = run.training.get("max-epoch")
    if experiment.data.kind != "finetuning" and run.max_update and epochs is None:
        raise ValueError("training.max-epoch must be given beside max-update, 0 where updates alone bound the run")
    if not run.max_update and epochs is not None and not int(epochs):
        raise ValueError("training.max-update or training.max-epoch must be given, above 0: nothing ends the run")


def _multiplied(experiment: Experiment, grid: RunGrid) -> list[PlannedRun]:
    options: dict[str, list[Any]] = {
        "levels": [FLOAT],
        "format": [""],  # no default: when that of dsq changes, a plan must not
        "seed": [1],
        **experiment.options,
        **grid.options,
    }
    training = {**experiment.training, **grid.training}
    runs: dict[str, PlannedRun] = {}
    for values in itertools.product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        seed = int(chosen.pop("seed"))
        if chosen["levels"] != FLOAT and not chosen["format"]:
            raise ValueError(f'runs: levels = "{chosen["levels"]}" needs a format, as in format = "snvint"')
        name = f"{_name(chosen, experiment.options, grid)}_seed{seed}"
        if chosen["levels"] == FLOAT:
            chosen = {"levels": FLOAT}
        run = PlannedRun(name, grid.label, grid.paper, chosen, seed, training)
        if runs.setdefault(name, run) != run:
            raise ValueError(
                f"runs: two of them are {name}, of {runs[name].options} and {run.options}: write one otherwise"
            )
    return list(runs.values())


def _name(options: Mapping[str, Any], common: Mapping[str, Any], grid: RunGrid) -> str:
    """Letters that every file system takes: fp32, or format, levels and rise, and what is not every run's."""
    label = [re.sub(r"[^\w.=-]+", "-", grid.label).strip("-").lower()] if grid.training else []
    if options["levels"] == FLOAT:
        return "_".join(["fp32", *label])
    levels = [re.sub(r"\W+", "-", level) for level in re.findall(r"\[(.*?)\]", options["levels"])]
    parts = [str(options["format"]), *(levels or [str(options["levels"])])]
    if "rise_at" in options:
        parts.append(f"at{options['rise_at']}".replace(" ", "-"))
    shown = {"levels", "format", "rise_at"}
    others = {k: v for k, v in options.items() if k not in shown and common.get(k) != [v]}
    return "_".join([*parts, *(re.sub(r"[^\w.=-]+", "-", f"{k}={v}") for k, v in others.items()), *label])


def _words(flag: str, value: Scalar) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}"] if value else []
    return [f"--{flag}={value}"] if str(value).startswith("-") else [f"--{flag}", str(value)]


def rises(run: PlannedRun) -> list[float] | None:
    """The shares of the run at which a level but the first begins; None: when plateaus come, or epochs bound it."""
    moments = [float(word) for word in re.split(r"[\s,]+", str(run.options.get("rise_at", "")).strip()) if word]
    if len(re.findall(r"\[", run.levels)) == 1:
        return []
    if not moments or (max(moments) >= 1 and not run.max_update):
        return None
    return [min(moment if moment < 1 else math.ceil(moment) / run.max_update, 1.0) for moment in moments]
