"""The ledger of experiments: a CSV with a row a run, as analysis.experiments.report writes it, and its setups.

Of its columns these are read: recipe, score, measure, format, levels, level_tokens, exclude. A run without levels was
trained in float32.
"""

import csv
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from costmodel.cli.format_options import template
from costmodel.cli.run_history import LevelWork, RunHistory
from costmodel.model.quantisation import FP32, Setup
from dsq.precision import Precision

NEEDED = ("score", "measure", "levels", "level_tokens", "format")


@dataclass(frozen=True)
class MeasuredSetup:
    """One setup's runs, one for each seed."""

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
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"ledger {path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    missing = [name for name in NEEDED if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"ledger {path} has no column {missing[0]}, or no rows")
    recipes = {row.get("recipe", "") for row in rows}
    if recipe not in recipes and (recipe or len(recipes) > 1):
        raise ValueError(f"ledger {path}: --recipe must be one of {', '.join(sorted(recipes))}, got {recipe or 'none'}")
    numbered = [(n, row) for n, row in enumerate(rows, 2) if row["score"] and recipe in (None, row.get("recipe"))]
    measures = {row["measure"] for _, row in numbered}
    if len(measures) != 1:
        raise ValueError(f"ledger {path} mixes what its scores measure: {', '.join(sorted(measures)) or 'nothing'}")
    found: dict[str, tuple[RunHistory, list[float]]] = {}
    grouped: dict[str, list[float]] = defaultdict(list)
    for number, row in numbered:
        try:
            history = _history(row, described)
            name = _name(history)
            grouped[name].append(float(row["score"]))
        except ValueError as error:
            raise ValueError(f"ledger {path}, line {number}: {error}") from None
        found.setdefault(name, (history, grouped[name]))
    return [MeasuredSetup(name, history, tuple(scores)) for name, (history, scores) in found.items()], measures.pop()


def _history(row: dict[str, str], described: Mapping[str, Any]) -> RunHistory:
    if row["levels"] in ("", "none"):
        return RunHistory((LevelWork(FP32, 1, 1),), {})
    levels = re.findall(r"\[[^]]*\]", row["levels"])
    tokens = [int(float(count)) for count in row["level_tokens"].split()]
    if len(levels) != len(tokens):
        raise ValueError(f"{len(levels)} levels, but {len(tokens)} level_tokens")
    work = (
        LevelWork(Setup(template(row["format"], described), Precision.parse(level)), count, count)
        for level, count in zip(levels, tokens, strict=True)
    )
    return RunHistory(tuple(work), {}, row.get("exclude") or None)


def _name(history: RunHistory) -> str:
    """'snvint [3,3,3,16] 80%, [16,4,4,16] 20%'."""
    first, *rest = history.levels
    if not rest:
        return str(first.setup)
    parts = (f"{work.setup.precision} {share:.0%}" for work, share in zip(history.levels, history.shares, strict=True))
    return f"{first.setup.format.name} {', '.join(parts)}"
