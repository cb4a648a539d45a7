"""How long dsq-cost takes: cold commands, from start to exit."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from analysis.timing import in_turns
from dsq.command.files import write_text
from dsq.command.table import as_csv, table

COMMANDS = (
    *(("--help",), ("estimate", "[16,4,4,16]"), ("table",), ("explain", "[16,4,4,16]"), ("plan",)),
    ("plan", "--workload", "opt_1.3b", "--fit", "40GB", "--devices", "8", "--zero", "3"),
)
ROUNDS = 3


def run(out: Path) -> None:
    """Print the best times and write them to ``out``/cost.csv."""
    calls = {f"cold dsq-cost {' '.join(command)}": partial(_cold, command) for command in COMMANDS}
    seconds = in_turns(calls, ROUNDS, repeats=1, warm=0)
    rows: list[dict[str, Any]] = [{"what": name, "seconds": min(taken)} for name, taken in seconds.items()]
    print(table(rows, {"what": "", "seconds": ".2f"}))
    write_text(out / "cost.csv", as_csv(rows))
    print(f"written: {out / 'cost.csv'}")


def _cold(command: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, "-m", "costmodel", *command], check=True, capture_output=True)
