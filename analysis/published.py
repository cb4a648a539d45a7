"""Trainings that others published, against dsq-cost's prediction of them.

analysis/results/published_runs.csv: 108 trainings of MPT (table "mpt": mosaicml/llm-foundry) and 47 of others (table
"others", second-hand). The rule of exclusion and the seed below were committed before anything was fitted.
"""

import csv
import random
import re
from pathlib import Path

RUNS = Path(__file__).with_name("results") / "published_runs.csv"
#: draws the halves of the table "mpt": one is fitted, the other judges
SEED = 20261125
#: left out, because dsq-cost does not describe it: context parallelism, interleaved stages, 8-bit and 4-bit floats
EXCLUDED = re.compile(r"\bCP ?([2-9]|\d\d)|interleav|\bVP\d|fp8|fp4", re.IGNORECASE)

Row = dict[str, str]


def included() -> list[Row]:
    """Rows of the table of published trainings that the rule of exclusion leaves, in the table's order."""
    with RUNS.open(newline="", encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if not EXCLUDED.search(f"{row['layout']} {row['precision']}")]


def halves() -> tuple[list[Row], list[Row]]:
    """The rows of MPT that are fitted, and those that judge, each in the table's order."""
    rows = [row for row in included() if row["table"] == "mpt"]
    fitted = set(random.Random(SEED).sample(range(len(rows)), len(rows) // 2))
    return [row for at, row in enumerate(rows) if at in fitted], [
        row for at, row in enumerate(rows) if at not in fitted
    ]
