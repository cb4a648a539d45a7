"""The ledger of an experiment: ledger.csv, a row a finished run, and its rows by configuration.

A column that holds one number a level parts the numbers by a space. A configuration has the runs that differ in their
seeds alone.
"""

import csv
import math
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import fmean
from typing import Any

from analysis import ROOT
from analysis.experiments.recipe import Experiment, PlannedRun
from analysis.experiments.train import FLOAT
from costmodel.paper.calibrated import weighed
from dsq.command import as_csv, processor, read_text, turn_at, write_text

Row = dict[str, Any]
FILE = "ledger.csv"
#: the fields of DSQConfig that decide a run's numbers; a later option joins them by being in a recipe
_OPTIONS = (
    *("levels", "format", "box", "box_axis", "rounding", "exclude", "units", "patience", "threshold"),
    *("fraction_bits", "eval_full_precision"),
)
_PACKAGES = ("torch", "numpy", "fairseq", "sacrebleu", "sentencepiece")


def place(on_cpu: bool) -> dict[str, str]:
    """Describe the machine that starts a run: commit, versions, CPU and, if it trains on one, GPU."""
    import torch

    versions = [f"python {platform.python_version()}", *(f"{name} {_version(name)}" for name in _PACKAGES)]
    return {
        "commit": _commit(),
        "versions": ", ".join(versions),
        "cpu": f"{processor()} x {os.cpu_count()}",
        "gpu": "" if on_cpu or not torch.cuda.is_available() else torch.cuda.get_device_name(),
    }


def row(experiment: Experiment, run: PlannedRun, results: dict[str, Any], places: list[dict[str, str]]) -> Row:
    """The ledger's row of a run that ended with ``results``. ``places``: where it was started, and gone on with."""
    history = results.get("history", {})
    levels = history.get("levels", [])
    work = [level["tokens"] or level["updates"] for level in levels]
    costs = run.level_costs(experiment.workload)
    cost = weighed(costs, work) if costs and levels else None
    losses = [loss for _, loss in results["valid_loss"]]
    return {
        "recipe": experiment.name,
        "run": run.name,
        "set": "; ".join(experiment.changes) or None,
        "label": run.label,
        "score": results["bleu"],
        "measure": "BLEU",
        "best_valid_loss": min(losses, default=None),
        "arithmetic": cost.arithmetic if cost else None,
        "dram": cost.dram if cost else None,
        **{name: history.get(name) for name in _OPTIONS},
        "rise_at": None,
        **run.options,
        "seed": run.seed,
        "training": shlex.join(run.flags),
        "data": " ".join(f"{key}={value}" for key, value in experiment.data.settings().items()),
        "text_sha256": results.get("text_sha256"),
        "level_updates": _joined(level["updates"] for level in levels),
        "level_tokens": _joined(level["tokens"] for level in levels),
        "stash_bytes": _joined(level.get("stash_bytes", "-") for level in levels),
        "stash_bytes_fp32": _joined(level.get("stash_bytes_fp32", "-") for level in levels),
        # a resumed run knows those of its last session alone
        "seconds": results["seconds"]["train"] if len(places) == 1 else None,
        "sessions": len(places),
        **{key: " then ".join(dict.fromkeys(one[key] for one in places)) for key in places[0]},
        "signature": results["signature"],
    }


#: the columns that every reader of a ledger needs
COLUMNS = ("recipe", "run", "score", "levels", "format", "seed")


def read_ledger(path: Path) -> list[Row]:
    """Its rows, all texts. Raises ValueError where it is none."""
    rows: list[Row] = list(csv.DictReader(read_text(path).splitlines(), restval=""))
    if rows and (absent := [name for name in COLUMNS if name not in rows[0]]):
        raise ValueError(f"{path}: is no ledger of analysis.experiments.run: it has no column {absent[0]}")
    return rows


def add_row(path: Path, new: Row) -> None:
    """Put a row into the ledger, in place of one of the same recipe and run; the file is replaced as a whole.

    Processes take turns: several may be at one ledger's runs.
    """
    with turn_at(path.parent):
        rows = {(one["recipe"], one["run"]): one for one in (read_ledger(path) if path.exists() else [])}
        rows[new["recipe"], new["run"]] = new
        write_text(path, as_csv(list(rows.values())))


def _joined(values: Any) -> str:
    return " ".join(map(str, values))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _commit() -> str:
    """The checkout's commit, "+" behind it where tracked files differ; "" where there is no checkout."""
    said = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return said.stdout.strip()


@dataclass(frozen=True)
class Configuration:
    """The runs of a recipe that differ in their seeds alone."""

    recipe: str
    name: str  #: the name of its runs, without the seed
    rows: tuple[Row, ...]

    @property
    def first(self) -> Row:
        return self.rows[0]

    @property
    def is_float(self) -> bool:
        return bool(self.first["levels"] == FLOAT)

    @property
    def format(self) -> str:
        return "fp32" if self.is_float else str(self.first["format"])

    def differences(self, other: "Configuration") -> list[float]:
        """By how much each score is above ``other``'s of the same seed, of the seeds that both have."""
        theirs = {row["seed"]: float(row["score"]) for row in other.rows}
        return [float(row["score"]) - theirs[row["seed"]] for row in self.rows if row["seed"] in theirs]

    def above(self, other: "Configuration") -> float:
        """The mean of ``differences``; NaN where there are none."""
        return fmean(self.differences(other) or [math.nan])

    def values(self, column: str) -> list[float]:
        return [float(row[column]) for row in self.rows if row.get(column) not in (None, "")]

    def mean(self, column: str) -> float:
        """NaN where no row has the column."""
        return fmean(self.values(column) or [math.nan])


def configurations(rows: Sequence[Row]) -> dict[str, list[Configuration]]:
    """recipe -> its configurations, in the ledger's order.

    Raises ValueError where runs of a recipe were trained otherwise than the others, or on other data.
    """
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        name = re.sub(r"_seed\d+$", "", row["run"])
        found.setdefault(row["recipe"], {}).setdefault(name, []).append(row)
    for recipe in found:
        _check_alike(recipe, [row for row in rows if row["recipe"] == recipe])
    return {
        recipe: [Configuration(recipe, name, tuple(rows)) for name, rows in groups.items()]
        for recipe, groups in found.items()
    }


def _check_alike(recipe: str, rows: Sequence[Row]) -> None:
    for column in ("training", "data", "text_sha256"):
        told = {_settings(row[column]): row["run"] for row in rows if row.get(column)}
        if len(told) > 1:
            (one, first), (other, second), *_ = told.items()
            raise ValueError(
                f"{recipe}: {first} and {second} differ in {column} by {' '.join(sorted(one ^ other))}: "
                "report their ledgers apart"
            )


def _settings(text: str) -> frozenset[str]:
    """Flags or settings with their values, except the seed, DSQ's, and empty ones, which older ledgers lack."""
    words = re.split(r" (?=--|\w+=)", text)
    return frozenset(word for word in words if not word.startswith(("--seed ", "--dsq-")) and not word.endswith("="))
