"""The rows of ledgers by configuration: runs that differ in their seeds alone."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from analysis.experiments.ledger.ledger import Row
from analysis.experiments.training.flags import FLOAT


@dataclass(frozen=True)
class Configuration:
    """The runs of a recipe that differ in their seeds alone."""

    recipe: str
    name: str  #: that of its runs, without the seed
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

    @property
    def schedule(self) -> str:
        """Levels and rises in short: 4,3,3,8 -> 8,4,4,8 at 0.8."""
        short = " -> ".join(re.findall(r"\[(.*?)\]", self.first["levels"])) or "fp32"
        rise = self.first.get("rise_at")
        return f"{short} at {rise}" if rise else short

    @property
    def training(self) -> frozenset[str]:
        """The training's flags, but for the seed and DSQ's."""
        return frozenset(word for word in _settings(self.first.get("training") or "") if not word.startswith("--dsq-"))

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

    Raises ValueError where runs of one name and other seeds were trained otherwise, or on other data.
    """
    found: dict[str, dict[str, list[Row]]] = {}
    for row in rows:
        name = re.sub(r"_seed\d+$", "", row["run"])
        found.setdefault(row["recipe"], {}).setdefault(name, []).append(row)
    for recipe, groups in found.items():
        for rows in groups.values():
            _check_alike(recipe, rows)
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
                f"{recipe}: {first} and {second} differ in more than their seeds, in {column} by "
                f"{' '.join(sorted(one ^ other))}: report their ledgers apart"
            )


def _settings(text: str) -> frozenset[str]:
    """Flags or settings with their values, but for the seed, for empty ones, which older ledgers lack, and for where a
    model's folder lies."""
    words = re.split(r" (?=--|\w+=)", re.sub(r"(?<=pretrained=)\S*/(?=[^\s/])", "", text))
    return frozenset(word for word in words if not word.startswith("--seed ") and not word.endswith("="))
