"""An experiment as a small TOML file: data, training flags, and runs as a grid of levels, formats, seeds and so on.

    title = "what it is to show"

    [data]
    kind = "parallel"                      # the other fields: data.py
    path = "data/mt"

    [training]                             # dsq-train's flags without their dashes; true: a flag without a value
    max-update = 1100
    max-epoch = 0                          # updates alone bound the run

    [options]                              # of every run: fields of dsq.DSQConfig, and seed
    exclude = "output_projection"
    seed = [1, 2, 3]                       # a list is a grid: one run for each

    [[runs]]
    levels = "[4,4,4,8] [8,4,4,8]"        # "none": in floating point
    format = ["bfp", "sbfp"]
    rise_at = [0.5, 0.8]                   # two rises of one run are one text: "0.2 0.8"

In [[runs]], label names the row in tables, and paper holds the published score.
"""

import dataclasses
import itertools
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from analysis.experiments.data import KINDS, Data
from analysis.experiments.train import FLOAT, Training
from costmodel.model.methods import Setup
from costmodel.paper.calibrated import Cost, level_costs
from costmodel.workloads.named import load_workload
from dsq import formats
from dsq.arguments import choice, flag, number, whole_number
from dsq.command import read_toml
from dsq.precision import parse_levels

RECIPES = Path(__file__).with_name("recipes")
Scalar = str | int | float | bool


@dataclass(frozen=True)
class RunGrid:
    """One [[runs]] table: options, each one value or a list of them."""

    options: dict[str, list[Scalar]]
    label: str = ""  #: the row's name in tables
    paper: float | None = None  #: the score that the paper prints for it


@dataclass(frozen=True)
class Experiment:
    """A recipe as it was read."""

    name: str  #: the name of its file
    title: str
    data: Data
    training: dict[str, Scalar]
    options: dict[str, list[Scalar]]
    runs: tuple[RunGrid, ...]
    workload: str  #: the model that dsq-cost's paper profile costs
    changes: tuple[str, ...] = ()  #: lines that took the place of the file's own values


@dataclass(frozen=True)
class PlannedRun:
    """One run of an experiment."""

    name: str  #: the name of its folder; unique in the experiment
    label: str
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
        """The flags of dsq-train, except --dsq-levels."""
        dsq = {} if self.levels == FLOAT else {k: v for k, v in self.options.items() if k != "levels"}
        named = {**self.training, "seed": self.seed, **{f"dsq-{k.replace('_', '-')}": v for k, v in dsq.items()}}
        return [word for flag, value in named.items() for word in _words(flag, value)]

    def training_on(self, data: Data, prepared: Path) -> Training:
        """The training that this run is."""
        return Training(data, self.levels, tuple(self.flags), str(prepared))

    def level_costs(self, workload: str) -> list[Cost]:
        """The cost at each level by dsq-cost's paper profile; none in floating point, which the paper does not cost."""
        if self.levels == FLOAT:
            return []
        kind = formats.format_class(str(self.options["format"]))
        fields = {name: self.options[name] for name in formats.options(kind.name) if name in self.options}
        axis = str(self.options.get("box_axis", "contraction"))
        setups = [Setup(kind(formats.WIDEST, **fields), level, axis) for level in parse_levels(self.levels)]
        return level_costs(load_workload(workload), setups)


def load_experiment(path: Path, changes: Sequence[str] = ()) -> Experiment:
    """Read an experiment. Raises ValueError, one line that names the file and the key, for what it cannot mean.

    changes: lines of TOML that take the place of values outside [[runs]], as in "training.max-epoch = 1".
    """
    if not path.exists():
        raise ValueError(f"{path}: there is no such file; recipes are in {RECIPES}")
    content = read_toml(path)
    try:
        for change in changes:
            _change(content, change)
        return dataclasses.replace(_experiment(path.stem, content), changes=tuple(changes))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _change(content: dict[str, Any], change: str) -> None:
    """Put the values of a line of TOML into ``content``."""
    try:
        said = tomllib.loads(change)
    except tomllib.TOMLDecodeError:
        text = """must be a line of TOML, as in training.max-epoch=1 or 'data.task="rte"'"""
        raise ValueError(f"--set {change}: {text}") from None
    for key, value in said.items():
        known = content.get(key)
        content[key] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value


def _experiment(name: str, content: dict[str, Any]) -> Experiment:
    _only_known(content, ("title", "data", "training", "options", "runs", "workload"), "")
    title, data = _typed(content.get("title", ""), str, "title"), _data(_table(content, "data", ""))
    runs = content.get("runs")
    if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
        raise ValueError("runs must be tables headed [[runs]], at least one")
    return Experiment(
        name=name,
        title=title,
        data=data,
        training=_training(_table(content, "training", ""), "training"),
        options=_options(_table(content, "options", ""), "options"),
        runs=tuple(_grid(run, f"runs[{i}]") for i, run in enumerate(runs)),
        workload=_typed(content.get("workload", "transformer_iwslt_de_en"), str, "workload"),
    )


def _data(table: dict[str, Any]) -> Data:
    known = {one.name: one.type for one in dataclasses.fields(Data)}
    _only_known(table, known, "data.")
    choice("data.kind", table.get("kind"), KINDS)
    if not table.get("path"):
        raise ValueError("data.path must be given")
    return Data(**{key: _typed(value, known[key], f"data.{key}") for key, value in table.items()})


def _grid(table: dict[str, Any], where: str) -> RunGrid:
    return RunGrid(
        options=_options({key: value for key, value in table.items() if key not in ("label", "paper")}, where),
        label=_typed(table.get("label", ""), str, f"{where}.label"),
        paper=number(f"{where}.paper", table["paper"]) if "paper" in table else None,
    )


def _options(table: dict[str, Any], where: str) -> dict[str, list[Scalar]]:
    from dsq.config import DSQConfig  # brings torch, which `report` does without

    _only_known(table, ["seed", *(option.name for option in dataclasses.fields(DSQConfig))], f"{where}.")
    options = {key: value if isinstance(value, list) else [value] for key, value in table.items()}
    for key, values in options.items():
        if not values or not all(isinstance(one, Scalar) for one in values):
            raise ValueError(f"{where}.{key} must be a value, or a list of values for a run each, got {table[key]!r}")
        for value in values:
            if key in ("levels", "format"):
                _typed(value, str, f"{where}.{key}")
            elif key == "seed":
                whole_number(f"{where}.seed", value, 0)
    return options


def _training(table: dict[str, Any], where: str) -> dict[str, Scalar]:
    for key, value in table.items():
        if key == "seed" or key.startswith(("dsq-", "-")):
            raise ValueError(f"{where}.{key}: seeds and DSQ's options go under [options] or [[runs]], without dashes")
        if not isinstance(value, Scalar):
            raise ValueError(f"{where}.{key} must be a number, a text or true, got {value!r}")
    return table


def _table(content: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    table = content.get(key, {})
    if not isinstance(table, dict):
        raise ValueError(f"{where}{key} must be a table, got {table!r}")
    return table


def _typed(value: Any, kind: Any, key: str) -> Any:
    if kind is int:
        return whole_number(key, value, 1)
    if kind is bool:
        return flag(key, value)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text, got {value!r}")
    return value


def _only_known(table: Mapping[str, Any], known: Any, where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}{key} is no key here; accepted are {', '.join(known)}")


def plan(experiment: Experiment, only: list[str] | None = None) -> list[PlannedRun]:
    """The runs of ``experiment``, every grid's first seed first; those whose names match a glob of ``only``.

    Raises ValueError where nothing matches one of the globs, or two runs have one name.
    """
    runs = [run for grid in experiment.runs for run in _multiplied(experiment, grid)]
    seeds = list(dict.fromkeys(run.seed for run in runs))
    runs.sort(key=lambda run: seeds.index(run.seed))
    names = [run.name for run in runs]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"runs: two of them are {min(twice)}")
    for pattern in only or ():
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"--only {pattern}: matches no run; the first is {names[0]}")
    return [run for run in runs if not only or any(fnmatchcase(run.name, pattern) for pattern in only)]


def check(experiment: Experiment, runs: list[PlannedRun]) -> None:
    """Raise ValueError, naming the run, where its training could not be given its flags."""
    for run in {str((run.options, run.training)): run for run in reversed(runs)}.values():
        try:
            run.training_on(experiment.data, Path()).check()
            _check_length(run)
        except ValueError as error:
            raise ValueError(f"run {run.name}: {error}") from None


def _check_length(run: PlannedRun) -> None:
    """Raise ValueError where epochs that nobody gave would end the run before its updates, or nothing ends it."""
    epochs = run.training.get("max-epoch")
    if run.max_update and epochs is None:
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
    runs: dict[str, PlannedRun] = {}
    for values in itertools.product(*options.values()):
        chosen = dict(zip(options, values, strict=True))
        seed = int(chosen.pop("seed"))
        if chosen["levels"] != FLOAT and not chosen["format"]:
            raise ValueError(f'runs: levels = "{chosen["levels"]}" needs a format, as in format = "snvint"')
        name = f"{_name(chosen, experiment.options)}_seed{seed}"
        if chosen["levels"] == FLOAT:
            chosen = {"levels": FLOAT}
        run = PlannedRun(name, grid.label, chosen, seed, experiment.training)
        if runs.setdefault(name, run) != run:
            raise ValueError(
                f"runs: two of them are {name}, of {runs[name].options} and {run.options}: write one otherwise"
            )
    return list(runs.values())


def _name(options: Mapping[str, Any], common: Mapping[str, Any]) -> str:
    """Letters that every file system takes: fp32, or format, levels and rise, and what is not every run's."""
    if options["levels"] == FLOAT:
        return "fp32"
    levels = [re.sub(r"\W+", "-", level) for level in re.findall(r"\[(.*?)\]", options["levels"])]
    parts = [str(options["format"]), *(levels or [str(options["levels"])])]
    if "rise_at" in options:
        parts.append(f"at{options['rise_at']}".replace(" ", "-"))
    shown = {"levels", "format", "rise_at"}
    others = {k: v for k, v in options.items() if k not in shown and common.get(k) != [v]}
    return "_".join([*parts, *(re.sub(r"[^\w.=-]+", "-", f"{k}={v}") for k, v in others.items())])


def _words(flag: str, value: Scalar) -> list[str]:
    if isinstance(value, bool):
        return [f"--{flag}"] if value else []
    return [f"--{flag}={value}"] if str(value).startswith("-") else [f"--{flag}", str(value)]
