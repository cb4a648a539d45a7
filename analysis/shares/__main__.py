"""Where a step's time goes: samples of perf by kernel, of this tree and of another checkout, as a stacked bar each.

    python -m analysis.shares [--before OTHER_CHECKOUT] [--steps 8] [--out runs/bench]

The step of step.py on one thread, Python's collector off. Needs Linux's perf, and kernels that keep their symbols: of a
checkout whose setup.py strips them, link the objects again without -s.
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

from analysis import ROOT
from analysis.bench.step import BATCH, LENGTH, WIDTH
from analysis.figures import look, save
from analysis.revisions.other_tree import check_tree, run_in
from analysis.shares.sampled_steps import CONTESTANTS
from dsq.command.files import make_folder, write_text
from dsq.command.parser import OneLineParser, count, guarded
from dsq.command.table import as_csv, table

PROG = "python -m analysis.shares"
#: group -> what "library symbol" has in it; the first that matches counts
GROUPS = {
    "our attention": r"_native.*(attention|head<|exponentials|copy_in|copy_out|transpose_in)",
    "our GEMMs": r"_native.*(microkernel|tile<|dsq_gemm)",
    "our GEMMs' panels": r"_native.*(panel|pack_[ab]|pack<|multiply<)",
    "quantise and pack": r"_native",
    "GEMMs of MKL": r"mkl_blas",  # of PyTorch's attention, too
    "GEMMs of oneDNN": r"brgemm|jit_.*gemm",
    "PyTorch's attention but for GEMMs": r"flash_attention|_exp|softmax",
    "LayerNorm": r"LayerNorm|RowwiseMoments",
    "GELU": r"jit_uni|[Gg]elu",
    "adding, copying, summing": r"libtorch_cpu.*(VectorizedLoop|vectorized|sum|fill|copy|cpu_kernel)|memmove|memset",
    "Python, dispatch, allocator": r"",
}


def shares(tree: Path, name: str, steps: int) -> dict[str, Any]:
    """CPU milliseconds of a contestant's step by group."""
    with tempfile.TemporaryDirectory() as folder:
        control, data = f"{folder}/control", f"{folder}/data"
        os.mkfifo(control)
        perf = f"env ONEDNN_JIT_PROFILE=2 perf record -q -F 997 -D -1 --control fifo:{control} -o {data} --".split()
        printed = run_in(tree, "analysis.shares.sampled_steps", name, str(steps), control, below=perf)
        samples = f"perf report -i {data} --stdio -q --no-children -t ; -F overhead,dso,symbol".split()
        report = subprocess.run(samples, capture_output=True, text=True, check=True).stdout
    milliseconds = 1e3 * float(printed.splitlines()[-1])
    found = dict.fromkeys(GROUPS, 0.0)
    for line in filter(str.strip, report.splitlines()):
        percent, symbol = line.split(";", 1)
        group = next(group for group, pattern in GROUPS.items() if re.search(pattern, symbol))
        found[group] += float(percent.strip(" %")) / 100 * milliseconds
    return {"step": name, "ms": milliseconds} | found


@look()
def picture(rows: list[dict[str, Any]], path: Path) -> None:
    """A bar a step, stacked by group."""
    frame = pd.DataFrame(rows).set_index("step")[list(GROUPS)]
    figure, axis = plt.subplots(figsize=(9, 0.45 * len(rows) + 1.8))
    frame.plot.barh(stacked=True, ax=axis, width=0.7, colormap="tab20", edgecolor="white", linewidth=0.4)
    axis.invert_yaxis()
    axis.set(xlabel=f"CPU ms of a step on one thread: six blocks, d {WIDTH}, {BATCH * LENGTH} tokens", ylabel="")
    axis.tick_params(labelsize=8)
    axis.legend(ncols=3, fontsize=7, loc="lower center", bbox_to_anchor=(0.4, 1))
    save(figure, path)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--before", type=Path, help="root of another checkout, its kernels built")
    parser.add_argument("--steps", type=count, default=8, help="sampled of each (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the CSV and the picture")
    given = parser.parse_args(argv)

    def work() -> None:
        make_folder(given.out)
        rows = [shares(ROOT, name, given.steps) for name in CONTESTANTS]
        if given.before:
            old = check_tree(given.before)
            changed = [name for name, (_, options) in CONTESTANTS.items() if options and "stash" not in options]
            rows += [shares(old, name, given.steps) | {"step": f"{name}, before"} for name in changed]
        print(table(rows, dict.fromkeys(rows[0], ".0f") | {"step": ""}, markdown=True))
        write_text(given.out / "step_shares.csv", as_csv(rows, ".2f"))
        picture(rows, given.out / "step_shares.png")

    return guarded(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
