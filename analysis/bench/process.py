"""Memory of the process and time of a training step of a GPT, a fresh process a row (process_step.py).

    python -m analysis.bench process                                       # an hour and more on one core
    python -m analysis.bench process --only "^whole, in chunks" --batches 16    # rows measured before stay in the CSV
    python -m analysis.bench process --largest 4 --only "^(fp32, usual|whole, in chunks), first"

A row is called by its setup, the loss, and when dsq.give_memory_back was called: never ("none"), where the model exists
already ("late", as dsq.convert does by itself), or before the first tensor ("first").
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict, dataclass, replace
from typing import Any

from dsq.command.files import write_text
from dsq.command.parser import count
from dsq.command.table import as_csv

SETUPS = (
    "fp32",
    "autocast",
    "checkpoint",
    "checkpoint + autocast",
    "linears",
    "whole",
    "whole + autocast",
    "whole + packed checkpoints",
    "mesa",
    "gact",
)
LOSSES = ("usual", "in chunks")
SETTINGS = ("none", "late", "first")
#: what makes a row another one
KEYS = ("setup", "loss", "setting", "batch", "size", "threads")
#: figures of a row on the terminal, with their formats
SHOWN = {"batch": "", "above MiB": ".0f", "held MiB": ".0f", "process MiB": ".0f", "seconds": ".3g"}
#: the search for the largest batch ends where one that is larger by this share does not fit
NEAR = 1 / 32


@dataclass(frozen=True)
class Case:
    """A row to measure. ``size``: blocks, width, tokens, vocabulary."""

    setup: str
    loss: str
    setting: str
    batch: int
    size: tuple[int, ...] = (6, 512, 256, 8192)
    threads: int = 1
    steps: int = 3  #: that are timed

    @property
    def name(self) -> str:
        return f"{self.setup}, {self.loss}, {self.setting}"

    @property
    def labels(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in KEYS} | {"size": " ".join(map(str, self.size))}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=count, nargs="+", default=[8, 16, 32], help="sequences (default: 8 16 32)")
    parser.add_argument("--size", type=count, nargs=4, default=Case.size, help="blocks, width, tokens, vocabulary")
    parser.add_argument("--steps", type=count, default=Case.steps, help="steps that are timed (default: %(default)s)")
    parser.add_argument("--only", default="", help="regular expression: rows in whose name it is found")
    parser.add_argument("--largest", type=float, metavar="GIB", help="find the largest batch that fits, instead")


def run(options: argparse.Namespace) -> None:
    """Measure the rows asked for and write ``out``/process.csv and .png, or process_largest.csv."""
    import pandas as pd

    path = options.out / ("process_largest.csv" if options.largest else "process.csv")
    before: list[Any] = pd.read_csv(path).to_dict("records") if path.exists() else []
    keys = tuple(name for name in KEYS if name != "batch" or not options.largest)
    rows: dict[Any, dict[str, Any]] = {tuple(row[name] for name in keys): row for row in before}
    for case in cases(options):
        if options.largest:
            row = case.labels | {"batch": largest(case, options.largest * 1024), "GiB": options.largest}
        else:
            row = case.labels | measured(case)
        figures = ", ".join(f"{name} {row[name]:{spec}}" for name, spec in SHOWN.items() if name in row)
        print(f"{case.name}: {figures}", flush=True)
        rows[tuple(row[name] for name in keys)] = row
        write_text(path, as_csv(list(rows.values()), ".4g"))
    print(f"written: {path}")
    if not options.largest:
        from analysis.bench.process_picture import draw

        draw(pd.read_csv(path), path.with_suffix(".png"))
        print(f"written: {path.with_suffix('.png')}")


def cases(options: argparse.Namespace) -> list[Case]:
    """The rows that ``--only`` finds; ValueError where it finds none."""
    batches = options.batches[:1] if options.largest else options.batches
    names = [(setup, loss, setting) for setup in SETUPS for loss in LOSSES for setting in SETTINGS]
    rest = tuple(options.size), options.threads or 1, options.steps
    found = [Case(*name, batch, *rest) for batch in batches for name in names]
    found = [case for case in found if re.search(options.only, case.name)]
    if not found:
        raise ValueError(f"--only {options.only!r} finds no row; rows are called as in {Case(*names[0], 1).name!r}")
    return found


def measured(case: Case) -> dict[str, float]:
    """What process_step.py finds in a process of its own; ValueError with its last words if it fails."""
    environment = {name: value for name, value in os.environ.items() if name != "DSQ_ALLOCATOR"}
    environment["OMP_NUM_THREADS"] = str(case.threads)
    command = [sys.executable, "-m", "analysis.bench.process_step", json.dumps(asdict(case))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{case} failed: {done.stderr.strip()[-500:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def largest(case: Case, limit: float) -> int:
    """The largest batch whose process stays within ``limit`` MiB, a few per cent too small at most; 0: not even one."""
    fits, over, batch = 0, sys.maxsize, case.batch
    while over - fits > max(1, fits * NEAR):
        found = measured(replace(case, batch=batch, steps=1))
        if found["process MiB"] <= limit:
            fits = batch
        else:
            over = batch
        room = limit - found["process MiB"] + found["above MiB"]  # memory grows about as the batch does
        batch = min(max(fits + 1, int(batch * room / found["above MiB"])), over - 1)
    return fits
