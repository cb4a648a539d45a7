"""Every stash policy side by side: bytes, peak and gradient error. Times: python -m analysis.bench policies.

    python -m analysis.stash.compare --out RUN
    python -m analysis.stash.compare --out RUN --models resnet --only bfp selective
    python -m analysis.stash.compare --out RUN --measure sizes

encoder     6 pre-LN blocks, d 512, 8 heads, ffn 2048, GELU, 16 x 128 tokens
resnet      ResNet-20 (32/64/128), 64 x 3 x 32 x 32; its other two rows train norms only and nothing but the input,
            with batch norm in evaluation mode
boundaries  a GPT of 12 blocks, d 256, one sequence of 2,048 tokens; all but its first row checkpoint every block
Random weights and data.

    stash     MiB kept at the end of the forward (dsq.stash.measure); weights and the batch excluded
    held      MiB that malloc holds at the end of the forward, above what it holds between steps, counted in a process
              of its own (analysis.stash.allocator); the loss keeps nothing
    peak      MiB that it holds at most during forward and backward, counted likewise
    error     |g - g0| / |g0| over all gradients, g0 from the plain model; for a stochastic policy the mean over seeds
    cosine    of g and g0
    slope     stochastic policies: <mean of g over seeds, g0> / <g0, g0>, and its standard error; 1 where unbiased

RUN/compare_stash.csv holds one row a setup; what was measured before is kept, so the command may be run in parts. It
also draws RUN/compare_stash.png.
"""

import argparse
import copy
import gc
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from matplotlib.axes import Axes
from torch import Tensor, nn

from analysis.attach import attach
from analysis.figures import BLUE, GREEN, look, save
from analysis.stash.allocator import HeldBytes, figures, step_bytes
from analysis.stash.setups import CASES, SETUPS, PolicySetup, TrainingCase, loss_that_keeps_nothing
from dsq import stash
from dsq.command import OneLineParser, as_csv, count, guarded, make_folder, table, write_text

PROG = "python -m analysis.stash.compare"
MIB = 2**20
SHOWN = {"model": "", "setup": "", "stash, MiB": ".1f", "held, MiB": ".1f", "peak, MiB": ".0f"}
SHOWN |= {"error": ".4f", "cosine": ".4f", "slope": ".3f", "slope +-": ".3f"}
MODELS = ["encoder", "resnet", "boundaries"]
MEASURED = ["sizes", "gradients"]
Row = dict[str, Any]


class Bench:
    """A case: its plain model, batch, gradient and stash."""

    def __init__(self, case: TrainingCase) -> None:
        torch.manual_seed(0)
        self.case, self.plain = case, case.model()
        self.x, self.y = case.batch()
        case.prepare(self.plain, self.x)
        self.gradient = self.step(self.plain)

    def step(self, model: nn.Module) -> Tensor:
        """Forward and backward; all gradients in one vector."""
        leaves = [t for t in (self.x, *model.parameters()) if t.requires_grad]
        for leaf in leaves:
            leaf.grad = None
        self.case.loss(model(self.x), self.y).backward()
        return torch.cat([leaf.grad.flatten() for leaf in leaves if leaf.grad is not None]).double()


def row(setup: PolicySetup, bench: Bench, plain: Bench, measured: list[str], seeds: int) -> Row:
    """Measure one setup against the plain model's gradient: what SHOWN has of ``measured``."""
    made: Row = {"model": setup.model, "setup": setup.row_name}
    if "sizes" in measured:
        claimed, step = sizes(setup)
        made |= {"stash, MiB": claimed / MIB, "held, MiB": step.stash / MIB}
        made |= {"peak, MiB": step.peak / MIB}
    if "gradients" in measured:
        model = trained(setup.name, bench)
        made |= against(plain.gradient, [bench.step(model) for _ in range(seeds if setup.stochastic else 1)])
    return made


def trained(name: str, bench: Bench) -> nn.Module:
    """The model under a setup after two steps: estimates and caches exist, gact has adapted."""
    model = copy.deepcopy(bench.plain)
    attach(model, name)
    bench.step(model)
    bench.step(model)
    return model


def against(exact: Tensor, draws: list[Tensor]) -> Row:
    """Draws of a gradient against the exact one."""
    norm = exact.norm()
    slopes = [float(g @ exact / norm**2) for g in draws]
    noisy = len(draws) > 1
    return {
        "error": statistics.mean(float((g - exact).norm() / norm) for g in draws),
        "cosine": statistics.mean(float(g @ exact / (g.norm() * norm)) for g in draws),
        "slope": statistics.mean(slopes) if noisy else None,
        "slope +-": statistics.stdev(slopes) / len(slopes) ** 0.5 if noisy else None,
    }


def sizes(setup: PolicySetup) -> tuple[int, HeldBytes]:
    """Bytes of the stash as dsq.stash.measure has them, and those that malloc holds for a step."""
    claimed, *step = figures("analysis.stash.compare", "--count", SETUPS.index(setup))
    return claimed, HeldBytes(*step)


def count_setup(number: int) -> list[int]:
    """Bytes claimed, and held, at the peak and left by a step of one setup, in a counted process."""
    setup = SETUPS[number]
    case = CASES[setup.case]
    torch.manual_seed(0)
    model, (x, _) = case.model(), case.batch()
    case.prepare(model, x)
    attach(model, setup.name)
    step = step_bytes(loss_that_keeps_nothing(model, x))
    return [stash.measure(lambda: model(x)).nbytes, step.stash, step.peak, step.left]


def compare(setups: list[PolicySetup], out: Path, measured: list[str], seeds: int) -> None:
    """Measure, row by row; write the CSV after each."""
    make_folder(out)
    file = out / "compare_stash.csv"
    before: list[Any] = pd.read_csv(file).to_dict("records") if file.exists() else []
    rows: dict[tuple[str, str], Row] = {(it["model"], it["setup"]): it for it in before}
    benches: dict[str, Bench] = {}
    for setup in setups:
        plain_case = setup.case.replace(", SDPA", "")
        benches = {case: it for case, it in benches.items() if case.partition(",")[0] == setup.model}
        for case in (plain_case, setup.case):
            benches[case] = benches.get(case) or Bench(CASES[case])
        made = row(setup, benches[setup.case], benches[plain_case], measured, seeds)
        key = setup.model, setup.row_name
        rows[key] = made = dict.fromkeys(SHOWN) | rows.get(key, {}) | made
        order = [(it.model, it.row_name) for it in SETUPS]
        write_text(file, as_csv([rows[key] for key in order if key in rows]))
        print(table([made], SHOWN, markdown=True).splitlines()[-1], flush=True)
        gc.collect()
    draw(pd.read_csv(file), out / "compare_stash.png")
    print(f"CSV and picture: {out}/compare_stash.*")


@look()
def draw(results: pd.DataFrame, path: Path) -> None:
    """Write the picture: bars of the bytes held, and dots of the gradient's error."""
    groups = [(str(name), rows.iloc[::-1]) for name, rows in results.groupby("model", sort=False)]
    heights = [len(rows) + 2 for _, rows in groups]
    size, widths = (9, 0.27 * sum(heights) + 0.8), (2.2, 1)
    figure, grid = plt.subplots(
        len(groups), 2, figsize=size, height_ratios=heights, width_ratios=widths, sharey="row", squeeze=False
    )
    for (name, rows), (left, right) in zip(groups, grid, strict=True):
        _stash(left, rows, name)
        right.plot(rows["error"], range(len(rows)), linestyle="", marker="D", color=GREEN, markersize=5)
        right.set_xlabel("relative gradient error")
        right.tick_params(axis="y", length=0)
        right.set_xscale("symlog", linthresh=1e-3)
        right.set_xlim(-1e-4, None)
        for axes in (left, right):
            axes.grid(axis="x")
    save(figure, path)


def _stash(axes: Axes, rows: pd.DataFrame, name: str) -> None:
    places = range(len(rows))
    axes.barh(places, rows["held, MiB"], color=BLUE, height=0.62)
    for place, value in zip(places, rows["held, MiB"], strict=True):
        axes.annotate(f"{value:.1f}", (value, place), (4, 0), textcoords="offset points", va="center", fontsize=8)
    axes.set_yticks(places, rows["setup"], fontsize=9)
    axes.set_xlabel("held at the end of the forward, MiB")
    axes.set_title(name, loc="left", fontweight="bold")


def main(argv: list[str] | None = None) -> int:
    """The command; its exit status."""
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)  # of the process that is counted: a setup's number
    parser.add_argument(
        "--out",
        type=Path,
        required="--count" not in (argv or sys.argv),
        help="folder for the CSV and the picture",
    )
    parser.add_argument("--models", nargs="+", default=MODELS[:2], choices=MODELS)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="setups whose name has one of these in it")
    parser.add_argument("--measure", nargs="+", default=MEASURED, choices=MEASURED)
    parser.add_argument("--seeds", type=count, default=8, help="draws of a stochastic policy's gradient (default 8)")
    given = parser.parse_args(argv)
    if given.count is not None:
        print(json.dumps(count_setup(given.count)))
        return 0
    only = given.only or [""]
    setups = [it for it in SETUPS if it.model in given.models and any(text in it.name for text in only)]
    if not setups:
        parser.error(f"--only {' '.join(only)}: no setup has that in its name")
    return guarded(PROG, lambda: compare(setups, given.out, given.measure, given.seeds))


if __name__ == "__main__":
    sys.exit(main())
