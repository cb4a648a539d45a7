"""How long dsq-cost takes: sweeps of 131,072 configurations, and cold commands, from start to exit."""

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from analysis.timing import Call, in_turns
from costmodel.hardware.hardware import load_hardware
from costmodel.model.quantisation import Setup
from costmodel.model.sweep import front, grid, parse_range, sweep
from costmodel.workloads.named import WORKLOADS, load_workload
from dsq.command.files import write_text
from dsq.command.table import as_csv, table
from dsq.formats import BFP, FixedPoint

RANGES = ["2:16,32"] * 4  #: 16^4 configurations, in two formats
COMMANDS = (
    *(("--help",), ("estimate", "[16,4,4,16]"), ("table",), ("explain", "[16,4,4,16]"), ("plan",)),
    ("plan", "--workload", "opt_1.3b", "--fit", "40GB", "--gpus", "8"),
)
ROUNDS = 3


def run(out: Path) -> None:
    """Print the best times and write them to ``out``/cost.csv."""
    calls = {f"sweep {name}": _sweep(name) for name in WORKLOADS}
    calls |= {f"cold dsq-cost {' '.join(command)}": partial(_cold, command) for command in COMMANDS}
    seconds = in_turns(calls, ROUNDS, repeats=1, warm=0)
    rows: list[dict[str, Any]] = [{"what": name, "seconds": min(taken)} for name, taken in seconds.items()]
    print(table(rows, {"what": "", "seconds": ".2f"}))
    write_text(out / "cost.csv", as_csv(rows))
    print(f"written: {out / 'cost.csv'}")


def _sweep(name: str) -> Call:
    """Costs every configuration in both formats and finds where no bit is free."""
    workload, hardware = load_workload(name), load_hardware("a100-80gb")
    precision = grid([parse_range(text) for text in RANGES])

    def both_formats() -> None:
        for template in (BFP(32), FixedPoint(32)):
            columns = sweep(workload, Setup(template, precision), hardware)
            front(precision, [columns["time"], columns["dram"]])

    return both_formats


def _cold(command: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, "-m", "costmodel", *command], check=True, capture_output=True)
