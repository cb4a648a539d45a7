"""Memory of the process and time of a training step of a GPT, a fresh process a row.

    python -m analysis.bench process                                       # an hour and more on one core
    python -m analysis.bench process --only "^all, in chunks" --batches 16    # rows measured before stay in the CSV
    python -m analysis.bench process --largest 4 --only "^(fp32, usual|all, in chunks), first"

A row is called by its setup, the loss, and what the process gives back: as it is under DSQ_ALLOCATOR=0 ("none"), as
dsq.convert and dsq.stash.apply leave it ("own"), or after dsq.release_memory ("first").
"""

import argparse
import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq
from analysis.figures import BLUE, GREY, ORANGE, save
from analysis.models import GPT, attach
from analysis.timing import host_clock
from dsq.command import as_csv, count, write_text
from dsq.precision import DEFAULT_LEVELS, SAVING_LEVELS
from dsq.process_memory import resident

WARM = 2  #: steps that are not timed: caches exist after them, and gact has chosen its bits
#: setup -> its name in analysis/models.py
SETUPS = {
    "fp32": "plain",
    "autocast": "autocast",
    "checkpoint": "around checkpoint",
    "checkpoint + autocast": "around checkpoint + autocast",
    "linears": f"{DEFAULT_LEVELS[0]} headless",
    "all": f"{DEFAULT_LEVELS[0]} all headless",
    "all + autocast": f"{DEFAULT_LEVELS[0]} all headless + autocast",
    "saving + autocast": f"{SAVING_LEVELS[0]} all headless + autocast",
    "compiled autocast": "autocast + compiled",
    "compiled checkpoint + autocast": "around checkpoint + autocast + compiled",
    "compiled saving + autocast": "snvint 4 + autocast + compiled",
    "all + packed checkpoints": f"{DEFAULT_LEVELS[0]} all headless + around snvint 4",
    "mesa": "mesa",
    "gact": "gact",
    "wtacrs + bfp": "wtacrs 0.3 + bfp 4",
}
LOSSES = ("usual", "in chunks")
SETTINGS = ("none", "own", "first")
#: the fields that tell rows apart
KEYS = ("setup", "loss", "setting", "batch", "size", "threads")
#: the search for the largest batch ends where one that is larger by this share does not fit
NEAR = 1 / 32


@dataclass(frozen=True)
class ProcessCase:
    """A row to measure. ``size``: blocks, width, tokens, vocabulary."""

    setup: str
    loss: str
    setting: str
    batch: int
    size: tuple[int, ...] = (6, 512, 256, 8192)
    threads: int = 1
    steps: int = 3  #: timed steps
    dropout: float = 0.0  #: of attention, and of each branch

    @property
    def name(self) -> str:
        return f"{self.setup}, {self.loss}, {self.setting}"

    @property
    def labels(self) -> dict[str, Any]:
        dropout = {"dropout": self.dropout} if self.dropout else {}
        return {name: getattr(self, name) for name in KEYS} | {"size": " ".join(map(str, self.size))} | dropout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=count, nargs="+", default=[8, 16, 32], help="sequences (default: 8 16 32)")
    parser.add_argument(
        "--size", type=count, nargs=4, default=ProcessCase.size, help="blocks, width, tokens, vocabulary"
    )
    parser.add_argument(
        "--steps", type=count, default=ProcessCase.steps, help="steps that are timed (default: %(default)s)"
    )
    parser.add_argument("--only", default="", help="regular expression: rows in whose name it is found")
    parser.add_argument("--dropout", type=float, default=0.0, help="rows of process_dropout.csv (default: none)")
    parser.add_argument("--largest", type=float, metavar="GIB", help="find the largest batch that fits, instead")


def run(options: argparse.Namespace) -> None:
    """Measure the rows asked for and write ``out``/process.csv and front.png; or process_dropout.csv, _largest.csv."""
    kind = "_largest" if options.largest else "_dropout" if options.dropout else ""
    path = options.out / f"process{kind}.csv"
    import pandas as pd

    before: list[Any] = pd.read_csv(path).to_dict("records") if path.exists() else []
    keys = tuple(name for name in KEYS if name != "batch" or not options.largest)
    rows: dict[Any, dict[str, Any]] = {tuple(row[name] for name in keys): row for row in before}
    for case in cases(options):
        if options.largest:
            row = case.labels | {"batch": largest(case, options.largest * 1024), "GiB": options.largest}
        else:
            row = case.labels | measured(case)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
        rows[tuple(row[name] for name in keys)] = row
        write_text(path, as_csv(list(rows.values()), ".4g"))
    print(f"written: {path}")
    if not kind:
        draw(list(rows.values()), options.out / "front.png")
        print(f"written: {options.out / 'front.png'}")


def cases(options: argparse.Namespace) -> list[ProcessCase]:
    """The rows that ``--only`` finds; ValueError where it finds none."""
    batches = options.batches[:1] if options.largest else options.batches
    names = [(setup, loss, setting) for setup in SETUPS for loss in LOSSES for setting in SETTINGS]
    sizes: tuple[Any, ...] = tuple(options.size), options.threads or 1, options.steps, options.dropout
    candidates = [ProcessCase(*name, batch, *sizes) for batch in batches for name in names]
    candidates = [case for case in candidates if re.search(options.only, case.name)]
    if not candidates:
        raise ValueError(
            f"--only {options.only!r} finds no row; rows are called as in {ProcessCase(*names[0], 1).name!r}"
        )
    return candidates


def measured(case: ProcessCase) -> dict[str, float]:
    """Call ``measure`` in a process of its own. Raises ValueError with its last words if it fails."""
    allocator = "0" if case.setting == "none" else "1"
    environment = {**os.environ, "OMP_NUM_THREADS": str(case.threads), "DSQ_ALLOCATOR": allocator}
    command = [sys.executable, "-m", "analysis.bench.process", json.dumps(asdict(case))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{case} failed: {done.stderr.strip()[-500:]}")
    results: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return results


def largest(case: ProcessCase, limit: float) -> int:
    """The largest batch whose process stays within ``limit`` MiB, a few per cent too small at most; 0: not even one."""
    fits, over, batch = 0, sys.maxsize, case.batch
    while over - fits > max(1, fits * NEAR):
        measurement = measured(replace(case, batch=batch, steps=1))
        if measurement["process MiB"] <= limit:
            fits = batch
        else:
            over = batch
        free = limit - measurement["process MiB"] + measurement["above MiB"]  # memory grows about as the batch does
        batch = min(max(fits + 1, int(batch * free / measurement["above MiB"])), over - 1)
    return fits


#: of the README's picture
TITLE = "CPU (one thread of an AMD EPYC, Zen 5), without parameters and optimizer state"
#: setups of the README's picture: what a stranger calls each, its color, and how far below its point the name begins
DRAWN = {
    "fp32": ("fp32", GREY, 6),
    "checkpoint": ("fp32, activation checkpointing", GREY, 6),
    "autocast": ("bf16 autocast", GREY, 9),
    "checkpoint + autocast": ("bf16 autocast, checkpointing", GREY, 14),
    "linears": ('dsq, stash="linears"', BLUE, -5),
    "all": ('dsq, stash="all"', ORANGE, -8),
}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw memory against time of a step, from the rows of the README: batch 16, freed memory given back."""
    figure, axes = plt.subplots(figsize=(7, 3.4))
    chosen = ProcessCase("", "in chunks", "first", 16).labels
    for row in rows:
        if row["setup"] not in DRAWN or any(row[name] != chosen[name] for name in KEYS if name != "setup"):
            continue
        label, color, below = DRAWN[row["setup"]]
        place = float(row["seconds"]), float(row["above MiB"])
        axes.plot(*place, "o", color=color, markersize=9)
        axes.annotate(label, place, (9, -below), textcoords="offset points", color=color)
    axes.set_title(TITLE, loc="left", fontsize=10)
    axes.set(xlim=(0, 1.4 * axes.get_xlim()[1]), xlabel="seconds per training step")  # room for the last name
    axes.set(ylim=(0, 1.1 * axes.get_ylim()[1]), ylabel="memory of a step, MiB")
    axes.text(0.01, 0.05, "better: down and left", color=GREY, style="italic", transform=axes.transAxes)
    save(figure, path)


# ---- the process of a row ----


def training(case: ProcessCase) -> tuple[Callable[[], Tensor], nn.Module]:
    """The loss of a batch, and the model."""
    blocks, width, tokens, vocabulary = case.size
    model = GPT(vocabulary, tokens, width, blocks, max(1, width // 64), case.dropout, tied=False)
    attach(model, SETUPS[case.setup])
    ids, targets = torch.randint(case.size[-1], (2, case.batch, case.size[2]))

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in case.setup):
            if case.loss == "usual":
                return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten())
            options = nn.LinearCrossEntropyOptions()
            hidden = model(ids, logits=False).flatten(0, 1)  # policies act within the model's own forward
            return F.linear_cross_entropy(hidden, model.head.weight, targets.flatten(), options=options)

    return loss, model


def measure(case: ProcessCase) -> dict[str, float]:
    """MiB of the resident set's high-water mark above the state before the first step, or behind the compiler
    (parameters, AdamW's moments and the batch exist). Besides, MiB of the whole process at that mark, and the median of
    the seconds of a step: of CPU time on one thread.
    """
    if case.setting == "first":
        dsq.release_memory()
    torch.set_num_threads(case.threads)
    torch.manual_seed(0)
    loss_of_batch, model = training(case)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> None:
        loss_of_batch().backward()
        optimizer.step()
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the moments
    optimizer.zero_grad()
    for _ in range(WARM * case.setup.startswith("compiled")):  # what compiling takes is no step's
        step()
    gc.collect()
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = resident()["resident"]
    clock = host_clock()
    seconds = [clock(step, 1) for _ in range(WARM + case.steps)][WARM:]
    peak = resident()["peak"]
    mib = {"above MiB": peak - before, "process MiB": peak}
    return {name: nbytes / 2**20 for name, nbytes in mib.items()} | {"seconds": median(seconds)}


if __name__ == "__main__":
    print(json.dumps(measure(ProcessCase(**json.loads(sys.argv[1])))))
