"""The ledger of experiments: a CSV with a row a run, as analysis.experiments.run writes it, and its setups.

Of its columns these are read: recipe, run, score, measure, format, levels, level_tokens, level_updates, box, box_axis,
exclude. A run without levels was trained in float32.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from os.path import commonpath
from pathlib import Path
from statistics import mean
from typing import Any

from costmodel.cli.query import described_setup
from costmodel.cli.run_history import LevelWork, RunHistory
from costmodel.model.quantisation import FP32
from dsq.arguments import number
from dsq.precision import Precision

NEEDED = ("score", "measure", "levels", "level_tokens", "format")


@dataclass(frozen=True)
class MeasuredSetup:
    """One setup's runs, one for each seed: their names differ in that alone."""

    name: str
    history: RunHistory  #: of its first run
    scores: tuple[float, ...]

    @property
    def score(self) -> float:
        return mean(self.scores)


def load_runs(path: str, recipe: str | None, described: Mapping[str, Any]) -> tuple[list[MeasuredSetup], str]:
    """The setups of a ledger's recipe and what their scores measure; `described`: options of the formats.

    Raises ValueError that names the file, also where it holds several recipes and none is given: their scores are of
    other data or other lengths of training.
    """
    rows = _of_recipe(path, _read(path), recipe)
    found: dict[str, dict[str, list[tuple[RunHistory, float]]]] = defaultdict(lambda: defaultdict(list))
    for line, row in rows:
        try:
            history, score = _history(row, described), number("score", float(row["score"]))
        except ValueError as error:
            raise ValueError(f"ledger {path}, line {line}: {error}") from None
        found[_name(history)][re.sub(r"_seed\d+$", "", row.get("run") or "")].append((history, score))
    setups = [
        MeasuredSetup(f"{name}{_rest(run, runs)}", seeds[0][0], tuple(score for _, score in seeds))
        for name, runs in found.items()
        for run, seeds in runs.items()
    ]
    return setups, rows[0][1]["measure"]


def _read(path: str) -> list[dict[str, str]]:
    """The ledger's rows."""
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"ledger {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    missing = [name for name in NEEDED if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"ledger {path} has no column {missing[0]}, or no rows")
    return rows


def _of_recipe(path: str, rows: list[dict[str, str]], recipe: str | None) -> list[tuple[int, dict[str, str]]]:
    """The recipe's rows that have a score, each with its line; their scores measure one thing."""
    recipes = {row.get("recipe") or "" for row in rows}
    if recipe not in recipes and (recipe or len(recipes) > 1):
        raise ValueError(f"ledger {path}: --recipe must be one of {', '.join(sorted(recipes))}, got {recipe or 'none'}")
    numbered = [(n, row) for n, row in enumerate(rows, 2) if row["score"] and recipe in (None, row.get("recipe"))]
    for line, row in numbered:
        if None in row or None in row.values():
            raise ValueError(f"ledger {path}, line {line}: it has not as many fields as the first line")
    measures = {row["measure"] for _, row in numbered}
    if len(measures) != 1:
        raise ValueError(f"ledger {path} mixes what its scores measure: {', '.join(sorted(measures)) or 'nothing'}")
    return numbered


def _rest(run: str, runs: Collection[str]) -> str:
    """What tells ``run`` from others of its levels: the words of its name that not all of ``runs`` begin with."""
    shared = commonpath([one.replace("_", "/") for one in runs])
    rest = run[len(shared) :].strip("_")
    return f" ({rest})" if rest else ""


def _history(row: dict[str, str], described: Mapping[str, Any]) -> RunHistory:
    if row["levels"] in ("", "none"):
        return RunHistory((LevelWork(FP32, 1, 1),), {})
    levels = re.findall(r"\[[^]]*\]", row["levels"])
    tokens = _counts("level_tokens", row)
    updates = _counts("level_updates", row) or [0] * len(tokens)
    if not len(levels) == len(tokens) == len(updates):
        raise ValueError(f"{len(levels)} levels, but {len(tokens)} level_tokens and {len(updates)} level_updates")
    if not any(tokens + updates):
        raise ValueError("no level records any work (level_tokens or level_updates)")
    recorded: dict[str, Any] = {"format": row["format"]}
    recorded |= {"box": int(row["box"])} if row.get("box") else {}
    recorded |= {"box_axis": row["box_axis"]} if row.get("box_axis") else {}
    work = (
        LevelWork(described_setup({**described, **recorded}, Precision.parse(level)), *counts)
        for level, *counts in zip(levels, updates, tokens, strict=True)
    )
    return RunHistory(tuple(work), {}, row.get("exclude") or None)


def _counts(column: str, row: dict[str, str]) -> list[int]:
    """Of each level."""
    return [int(number(column, float(count), least=0)) for count in (row.get(column) or "").split()]


def _name(history: RunHistory) -> str:
    """'snvint [3,3,3,16] 80%, [16,4,4,16] 20%'."""
    first, *rest = history.levels
    if not rest:
        return str(first.setup)
    parts = (f"{work.setup.precision} {share:.0%}" for work, share in zip(history.levels, history.shares, strict=True))
    return f"{first.setup.format.name} {', '.join(parts)}"
