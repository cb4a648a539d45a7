"""An experiment as a small TOML file: data, training flags, and runs as a grid of levels, formats, seeds and so on.

    title = "what it is to show"

    [data]
    kind = "generated"                     # or "parallel", "labelled", "finetuning", with path and prefix or task
    vocab = 2000

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

In [[runs]], label names the row in tables, paper holds the published score, and training more flags.
"""

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsq.arguments import choice, flag, number, whole_number

RECIPES = Path(__file__).parents[1] / "recipes"
KINDS = ("generated", "parallel", "labelled", "finetuning")
Scalar = str | int | float | bool


@dataclass(frozen=True)
class Data:
    """Where the text is from, and how it is cut into subwords."""

    #: generated (by analysis.corpus), parallel (for translate.py), labelled (for glue.py), finetuning (for finetune.py)
    kind: str
    vocab: int = 4000  #: BPE subwords
    sentences: int = 20_000  #: generated: of the training text
    held_out: int = 500  #: generated: of valid, and of test
    corpus_seed: int = 1  #: generated
    path: str = ""  #: all others: the folder; --data overrides it
    prefix: str = ""  #: parallel: what the files' names begin with
    source: str = "de"  #: parallel
    target: str = "en"  #: parallel
    columns: str = "de,en"  #: parallel: of a .tsv
    lowercase: bool = False  #: parallel
    beam: int = 4  #: parallel and generated: of the search
    task: str = ""  #: labelled and finetuning: what the tables' names begin with
    pretrained: str = ""  #: folder of fairseq's RoBERTa (labelled) or of Hugging Face's model (finetuning)
    get: str = ""  #: where a person gets the data; shown when they are absent

    @property
    def translates(self) -> bool:
        return self.kind in ("generated", "parallel")


@dataclass(frozen=True)
class RunGrid:
    """One [[runs]] table: options, each one value or a list of them."""

    options: dict[str, list[Scalar]]
    label: str = ""  #: the row's name in tables
    paper: float | None = None  #: the score that the paper prints for it
    training: dict[str, Scalar] = field(default_factory=dict)


@dataclass(frozen=True)
class Experiment:
    name: str  #: of its file
    title: str
    data: Data
    training: dict[str, Scalar]
    options: dict[str, list[Scalar]]
    runs: tuple[RunGrid, ...]
    workload: str  #: what dsq-cost's paper profile costs
    changes: tuple[str, ...] = ()  #: what was said in place of the file's own values


def load_experiment(path: Path, changes: Sequence[str] = ()) -> Experiment:
    """Read an experiment. Raises ValueError, one line that names the file and the key, for what it cannot mean.

    changes: lines of TOML that take the place of values outside [[runs]], as in "training.max-epoch = 1".
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        for change in changes:
            _change(content, change)
        experiment = dataclasses.replace(_experiment(path.stem, content), changes=tuple(changes))
        for change in changes:
            _check_acts(experiment, change)
        return experiment
    except FileNotFoundError:
        raise ValueError(f"{path}: there is no such file; recipes are in {RECIPES}") from None
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


def _check_acts(experiment: Experiment, change: str) -> None:
    """Raise ValueError for an option or a flag of the training that each of [[runs]] has of its own."""
    said = tomllib.loads(change)
    for own in ("options", "training"):
        for key in said.get(own, {}):
            if all(key in getattr(grid, own) for grid in experiment.runs):
                raise ValueError(f"--set {change}: changes nothing, as each of [[runs]] has its own {key}")


def _experiment(name: str, content: dict[str, Any]) -> Experiment:
    _only_known(content, ("title", "data", "training", "options", "runs", "workload"), "")
    title = _typed(content.get("title", ""), str, "title")
    data = _data(_table(content, "data", ""))
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
        workload=_typed(content.get("workload", _WORKLOADS[data.translates]), str, "workload"),
    )


_WORKLOADS = {True: "transformer_iwslt_de_en", False: "roberta_base_mnli"}


def _data(table: dict[str, Any]) -> Data:
    known = {one.name: one.type for one in dataclasses.fields(Data)}
    _only_known(table, known, "data.")
    choice("data.kind", table.get("kind"), KINDS)
    data = Data(**{key: _typed(value, known[key], f"data.{key}") for key, value in table.items()})
    if data.kind == "generated" and data.path:
        raise ValueError(f"data.path {data.path}: data.kind = 'generated' makes its own text: leave path out")
    for kind, needed in _NEEDED:
        if data.kind == kind and not getattr(data, needed):
            raise ValueError(f"data.{needed} must be given for data.kind = {kind!r}")
    return data


_NEEDED = (
    *(("parallel", "path"), ("labelled", "path"), ("labelled", "task")),
    *(("finetuning", "path"), ("finetuning", "task"), ("finetuning", "pretrained")),
)


def _grid(table: dict[str, Any], where: str) -> RunGrid:
    own = {"label", "paper", "training"}
    grid = RunGrid(
        options=_options({key: value for key, value in table.items() if key not in own}, where),
        label=_typed(table.get("label", ""), str, f"{where}.label"),
        paper=number(f"{where}.paper", table["paper"]) if "paper" in table else None,
        training=_training(_table(table, "training", f"{where}."), f"{where}.training"),
    )
    if grid.training and not grid.label:
        raise ValueError(f"{where}.label must be given where {where}.training is: it tells the run from the others")
    return grid


def _options(table: dict[str, Any], where: str) -> dict[str, list[Scalar]]:
    from dsq.config import DSQConfig  # brings torch, which `report` does without

    _only_known(table, ["seed", *(option.name for option in dataclasses.fields(DSQConfig))], f"{where}.")
    options = {}
    for key, value in table.items():
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(one, Scalar) for one in values):
            raise ValueError(f"{where}.{key} must be a value, or a list of values for a run each, got {value!r}")
        options[key] = values
    for key in ("levels", "format"):
        for value in options.get(key, ()):
            _typed(value, str, f"{where}.{key}")
    for seed in options.get("seed", ()):
        whole_number(f"{where}.seed", seed, 0)
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
        return whole_number(key, value, 0 if key == "data.corpus_seed" else 1)
    if kind is bool:
        return flag(key, value)
    if not isinstance(value, str):
        raise ValueError(f"{key} must be a text, got {value!r}")
    return value


def _only_known(table: Mapping[str, Any], known: Any, where: str) -> None:
    for key in table:
        if key not in known:
            raise ValueError(f"{where}{key} is no key here; accepted are {', '.join(known)}")
