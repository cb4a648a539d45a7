"""The ledger: a row a run (task, setting, seed).

A row counts while its ``definition`` is that of the suite. A rerun takes the place of the earlier row.
"""

import csv
import subprocess
from pathlib import Path

from analysis import ROOT
from analysis.evidence.suite import IN_NATS, Suite, Task
from dsq.command import Record, as_csv, turn_at, write_text

LEDGER = ROOT / "analysis" / "results" / "evidence.csv"
#: what decides a run's numbers, but for the suite
CODE = ("dsq", "kernels", "fairseq_plugin")
Key = tuple[str, str, int]


def read_rows(path: Path, suite: Suite | None = None) -> dict[Key, Record]:
    """The rows by task, setting and seed; only those that count in ``suite``, if one is given."""
    if not path.exists():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = {(row["task"], row["setting"], int(row["seed"])): row for row in csv.DictReader(file)}
    if suite is None:
        return dict(rows)
    return {key: row for key, row in rows.items() if suite.definitions.get(key[:2]) == row["definition"]}


def enter(path: Path, row: Record) -> None:
    """Put a row into the ledger, in place of an earlier one of the same run. Processes take turns."""
    with turn_at(path.parent):
        rows = read_rows(path)
        rows[row["task"], row["setting"], row["seed"]] = row
        write_text(path, as_csv(list(rows.values())))


def difference(task: Task, row: Record, fp32: Record) -> float:
    """Return the loss less fp32's: in nats a token, or for a classifier as a share of fp32's loss."""
    loss, reference = float(row["loss"]), float(fp32["loss"])
    return loss - reference if task.kind in IN_NATS else loss / reference - 1


def revision() -> str:
    """The last commit that changed CODE, with "+" behind it where CODE has changes since; "" without a checkout."""

    def git(*words: str) -> str:
        said = subprocess.run(["git", *words, "--", *CODE], cwd=ROOT, capture_output=True, text=True, check=False)
        return said.stdout.strip()

    changed = "+" if git("status", "--porcelain", "--untracked-files=no") else ""
    return git("log", "-1", "--format=%h", "--abbrev=12") + changed
