"""Every stash policy side by side: bytes, peak, step time and gradient error, beside the smallest stash possible.

    python -m analysis.stash.compare --out RUN
    python -m analysis.stash.compare --out RUN --models resnet --only bfp selective
    python -m analysis.stash.compare --out RUN --measure times --steps 3

Encoder: 6 pre-LN blocks, d 512, 8 heads, ffn 2048, GELU, 16 x 128 tokens. ResNet-20 (32/64/128), 64 x 3 x 32 x 32; its
other two rows train norms only and nothing but the input, with batch norm in evaluation mode. Random weights and data.

    stash     MiB kept at the end of the forward (dsq.stash.measure); weights and the batch excluded
    held      MiB that malloc holds at the end of the forward, above what it holds between steps, counted in a process
              of its own (analysis.stash.allocator); the loss keeps nothing
    least     MiB: every saved value at the policy's bits, or what was measured once
    peak      MiB that it holds at most during forward and backward, counted likewise
    time      of a step, over that of the plain model; both timed in turns, medians; freed memory stays the process's
    error     |g - g0| / |g0| over all gradients, g0 from the plain model; for a stochastic policy the mean over seeds
    cosine    of g and g0
    slope     stochastic policies: <mean of g over seeds, g0> / <g0, g0>, and its standard error; 1 where unbiased

RUN/compare_stash.csv holds one row a setup; what was measured before is kept, so the command may be run in parts: sizes
and gradients on a busy machine, times on a quiet one. It also writes RUN/compare_stash.md and RUN/compare_stash.png.
"""

import argparse
import copy
import gc
import statistics
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from analysis.stash.allocator.counted import figures
from analysis.stash.allocator.held import HeldBytes
from analysis.stash.picture import draw
from analysis.stash.setups import CASES, SETUPS, PolicySetup, TrainingCase, attach
from analysis.timing.allocator import keep_freed_memory
from analysis.timing.timer import in_turns
from dsq import stash
from dsq.command.files import make_folder, write_text
from dsq.command.parser import OneLineParser, count, guarded
from dsq.command.table import as_csv, table

PROG = "python -m analysis.stash.compare"
MIB = 2**20
SHOWN = {
    "model": "",
    "setup": "",
    "stash, MiB": ".1f",
    "held, MiB": ".1f",
    "least, MiB": ".1f",
    "peak, MiB": ".0f",
    "time": ".2f",
}
MEASURED = ["sizes", "gradients", "times"]
SHOWN |= {"error": ".4f", "cosine": ".4f", "slope": ".3f", "slope +-": ".3f"}


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    made = OneLineParser(prog=PROG, description=__doc__)
    made.add_argument("--out", type=Path, required=True, help="folder for the table, the CSV and the picture")
    made.add_argument("--models", nargs="+", default=["encoder", "resnet"], choices=["encoder", "resnet"])
    made.add_argument("--only", nargs="+", metavar="TEXT", help="setups whose name has one of these in it")
    made.add_argument("--measure", nargs="+", default=MEASURED, choices=MEASURED)
    made.add_argument("--seeds", type=count, default=8, help="draws of a stochastic policy's gradient (default 8)")
    made.add_argument("--steps", type=count, default=5, help="timed steps of each setup (default 5)")
    return made


def chosen(args: argparse.Namespace) -> list[PolicySetup]:
    """The setups that the options ask for; ValueError if none."""
    found = [s for s in SETUPS if s.case.split(",")[0] in args.models]
    found = [s for s in found if not args.only or any(text in s.name for text in args.only)]
    if not found:
        raise ValueError(f"--only {' '.join(args.only)}: no setup has that in its name")
    return found


class Bench:
    """A case: its plain model, batch, gradient and stash."""

    def __init__(self, case: TrainingCase) -> None:
        torch.manual_seed(0)
        self.case, self.plain = case, case.model()
        self.x, self.y = case.batch()
        case.prepare(self.plain, self.x)
        self.gradient = self.step(self.plain)
        self.stash = stash.measure(lambda: self.plain(self.x)).nbytes / MIB

    def step(self, model: nn.Module) -> Tensor:
        """Forward and backward; all gradients in one vector. They stay allocated, as between the steps of a loop."""
        leaves = [t for t in (self.x, *model.parameters()) if t.requires_grad]
        for leaf in leaves:
            if leaf.grad is not None:
                leaf.grad.zero_()
        self.case.loss(model(self.x), self.y).backward()
        return torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]).double()

    def time_step(self, model: nn.Module) -> None:
        """What is timed: a step whose gradients are added to those there."""
        self.case.loss(model(self.x), self.y).backward()


def row(setup: PolicySetup, bench: Bench, plain: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one setup against the plain model's gradient and time: of SHOWN, what --measure asks for."""
    made: dict[str, Any] = {"model": setup.case.split(",")[0], "setup": row_name(setup, bench.case)}
    if "sizes" in args.measure:
        claimed, step = sizes(setup)
        found = claimed / MIB, step.stash / MIB, setup.least(bench.stash), step.peak / MIB
        made |= dict(zip(("stash, MiB", "held, MiB", "least, MiB", "peak, MiB"), found, strict=True))
    if args.measure == ["sizes"]:
        return made
    model, controllers = trained(setup, bench)
    if "gradients" in args.measure:
        draws = [bench.step(model) for _ in range(args.seeds if setup.stochastic else 1)]
        made |= against(plain.gradient, draws)
    if "times" in args.measure:
        calls = {"ours": lambda: bench.time_step(model), "plain": lambda: plain.time_step(plain.plain)}
        seconds = in_turns(calls, args.steps, repeats=1, warm=0)
        made["time"] = statistics.median(seconds["ours"]) / statistics.median(seconds["plain"])
    for controller in controllers:
        controller.remove()
    return made


def trained(setup: PolicySetup, bench: Bench) -> tuple[nn.Module, list[Any]]:
    """The model under a setup after two steps (estimates and caches exist, gact has adapted), and its controllers."""
    model = copy.deepcopy(bench.plain)
    controllers = attach(model, setup.policies)
    bench.step(model)
    bench.step(model)
    return model, controllers


def row_name(setup: PolicySetup, case: TrainingCase) -> str:
    """The setup's name, and who needs a gradient, where that is not every parameter."""
    return setup.name + (f" ({case.note})" if case.note else "")


def against(exact: Tensor, draws: list[Tensor]) -> dict[str, Any]:
    """Draws of a gradient against the exact one."""
    norm = exact.norm()
    slopes = [float(g @ exact / norm**2) for g in draws]
    errors = [float((g - exact).norm() / norm) for g in draws]
    cosines = [float(g @ exact / (g.norm() * norm)) for g in draws]
    noisy = len(draws) > 1
    return {
        "error": statistics.mean(errors),
        "cosine": statistics.mean(cosines),
        "slope": statistics.mean(slopes) if noisy else None,
        "slope +-": statistics.stdev(slopes) / len(slopes) ** 0.5 if noisy else None,
    }


def sizes(setup: PolicySetup) -> tuple[int, HeldBytes]:
    """Bytes of the stash as dsq.stash.measure has them, and those that malloc holds for a step."""
    claimed, *step = figures("analysis.stash.held_setup", SETUPS.index(setup))
    return claimed, HeldBytes(*step)


def compare(args: argparse.Namespace) -> None:
    """Measure, row by row; write the CSV after each."""
    setups = chosen(args)
    make_folder(args.out)
    keep_freed_memory()
    file = args.out / "compare_stash.csv"
    rows = {(r["model"], r["setup"]): r for r in read(file)} if file.exists() else {}
    benches: dict[str, Bench] = {}
    for setup in setups:
        for case in dict.fromkeys((setup.case.replace(", SDPA", ""), setup.case)):
            if case not in benches:
                benches = {name: b for name, b in benches.items() if name.split(",")[0] == case.split(",")[0]}
                benches[case] = Bench(CASES[case])
        plain = benches[setup.case.replace(", SDPA", "")]
        made = row(setup, benches[setup.case], plain, args)
        key = made["model"], made["setup"]
        rows[key] = made = dict.fromkeys(SHOWN) | rows.get(key, {}) | made
        write_text(file, as_csv(in_order(rows)))
        print(table([made], SHOWN, markdown=True).splitlines()[-1], flush=True)
        gc.collect()
    results = pd.read_csv(file)
    text = table(read(file), SHOWN, markdown=True)
    write_text(args.out / "compare_stash.md", text + "\n")
    draw(results, args.out / "compare_stash.png")
    print(f"\n{text}\n\ntable, CSV and picture: {args.out}/compare_stash.*")


def read(file: Path) -> list[dict[str, Any]]:
    """The rows of the CSV."""
    return [{str(name): value for name, value in row.items()} for row in pd.read_csv(file).to_dict("records")]


def in_order(rows: dict[tuple[str, str], dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows in the order of the setups."""
    order = [(s.case.split(",")[0], row_name(s, CASES[s.case])) for s in SETUPS]
    return [rows[key] for key in order if key in rows]


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    args = parser().parse_args(argv)
    return guarded(PROG, lambda: compare(args))


if __name__ == "__main__":
    sys.exit(main())
