"""Estimate the time and the peak memory of training steps on an H100 that is not there.

    python -m analysis.gpu.estimate [--residuals] [--out analysis/results/gpu_estimated.csv]

A step of the whole model, AdamW included, runs on fake tensors: PyTorch's own runtime, with graphs that Inductor
generates for the device (traced.py). The peak is the most that its storages hold at once; the allocator's rounding and
the scratch memory of libraries are not in it. The time is FLOPs and bytes over the rates below; launches and Python
take none. With --residuals the eager steps of gpu_steps.csv are counted in the same way, and printed beside what was
measured. Needs Triton, and g++ for the library that stands for the device.
"""

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from analysis import ROOT
from analysis.evidence.ledger import read_csv
from analysis.gpu import Machine
from analysis.gpu.designs import BASELINE, DESIGNS, Design
from analysis.gpu.step_count import StepCount, count_step
from analysis.gpu.traced import Work, environment, fake_h100
from analysis.gpu.training import GPT2, LARGE, LLAMA, Size, setups
from dsq.command import OneLineParser, Record, as_csv, check_writable, guarded, table, write_text

PROG = "python -m analysis.gpu.estimate"
RESULTS = ROOT / "analysis" / "results"
MIB = 2**20


@dataclass(frozen=True)
class Rates:
    """What a GPU does in a second."""

    bytes: float  #: that kernels read and write
    bfloat16_flops: float = 700e12  #: (gpu_products.csv: 673 to 774)
    float32_flops: float = 50e12  #: (gpu_products.csv: 49.8 to 51.2)
    attention_flops: float = 350e12

    def milliseconds(self, work: Work) -> float:
        seconds = work.moved_bytes / self.bytes
        for name in ("bfloat16_flops", "float32_flops", "attention_flops"):
            seconds += getattr(work, name) / getattr(self, name)
        return 1e3 * seconds


#: bytes: the copies of gpu_kernels.csv
RATES = {"NVIDIA H100 80GB HBM3": Rates(3.0e12), "NVIDIA H200": Rates(4.15e12)}
H100 = RATES["NVIDIA H100 80GB HBM3"]
SIZES = {"124 million": GPT2, "1.3 billion": LARGE}
CASES = (
    ("GPT 124M", GPT2),
    ("GPT 1.3B", LARGE),
    ("GPT 1.3B", LARGE._replace(batch=32)),
    ("Llama-3-8B", LLAMA),
    ("Llama-3-8B", LLAMA._replace(batch=1, tokens=32768)),
)


def estimates(model: str, size: Size) -> Iterator[Record]:
    """Yield a row a design, with the columns of gpu_estimated.csv."""
    counts = {name: count_step(size, design) for name, design in DESIGNS.items()}
    baseline = H100.milliseconds(counts[BASELINE].work)
    for name, count in counts.items():
        ms = H100.milliseconds(count.work)
        row: dict[str, Any] = {"model": model, "tokens": f"{size.batch} x {size.tokens:,}", "design": name}
        row |= {"ms": f"{ms:.1f}", "x compiled bf16": f"{ms / baseline:.2f}", "peak MiB": round(count.peak_bytes / MIB)}
        yield row | _of_block(count, size.blocks)


def _of_block(count: StepCount, blocks: int) -> dict[str, Any]:
    """Return what one block launches, moves and saves in a step; its graphs are those that run once a block or more."""
    graphs = [graph for graph, _ in count.calls]
    graphs = [graph for graph in graphs if graphs.count(graph) >= blocks]
    alive = [size for graph, size in count.calls if graph is graphs[0]][:blocks]  # before each block of the forward
    return {
        "launches of a block": sum(len(graph.launches) for graph in graphs) // blocks,
        "GB of a block": f"{sum(graph.moved_bytes for graph in graphs) / blocks / 1e9:.2f}",
        # without the first block, whose input the model's forward holds
        "saved MiB of a block": f"{(alive[-1] - alive[1]) / (blocks - 2) / MIB:.1f}",
    }


def residuals() -> Iterator[Record]:
    """Yield each row of gpu_steps.csv, as a CUDA graph if it was one, beside the estimate of its step.

    The H200's steps held the logits until the backward, in 786 MiB of bfloat16, or twice that.
    """
    with fake_h100():
        names = setups(Machine("H100", torch.device("cuda")))
    rows = sorted(read_csv(RESULTS / "gpu_steps.csv"), key=lambda row: (row["model"], row["setup"]))
    for (model, setup), same in groupby(rows, key=lambda row: (row["model"], row["setup"])):
        count = count_step(SIZES[model], Design(names[setup]))
        for row in same:
            ms, measured = RATES[row["machine"]].milliseconds(count.work), float(row["graph ms"] or row["ms"])
            peak, measured_peak = count.peak_bytes / MIB, float(row["peak MiB"])
            record: dict[str, Any] = {"machine": row["machine"], "model": model, "setup": setup}
            record |= {"ms": f"{measured:.0f}", "estimated": f"{ms:.0f}", "error": f"{ms / measured - 1:+.1%}"}
            record |= {"peak MiB": f"{measured_peak:,.0f}", "estimated MiB": f"{peak:,.0f}"}
            yield record | {"peak error": f"{peak / measured_peak - 1:+.1%}"}


def _write(out: Path) -> None:
    rows: list[Record] = []
    for model, size in CASES:
        rows += estimates(model, size)
        print(f"{model}, {size.batch} x {size.tokens:,} tokens: done", file=sys.stderr, flush=True)
        write_text(out, as_csv(rows))
    print(table(rows))


def _with_library(out: Path) -> None:
    """Begin again with the library that stands for the device. Raises ValueError if it or the output is impossible."""
    check_writable(out)
    try:
        variables = environment()
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"the library that stands for the GPU needs g++: {error}") from None
    os.execve(sys.executable, [sys.executable, "-m", "analysis.gpu.estimate", *sys.argv[1:]], variables)


def main() -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--residuals", action="store_true", help="print estimates beside measured eager steps, only")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu_estimated.csv", help="CSV file for the estimates")
    arguments = parser.parse_args()
    if "libfake_cuda" not in os.environ.get("LD_PRELOAD", ""):
        return guarded(PROG, lambda: _with_library(arguments.out))
    warnings.simplefilter("ignore")
    if arguments.residuals:
        return guarded(PROG, lambda: print(table(list(residuals()))))
    return guarded(PROG, lambda: _write(arguments.out))


if __name__ == "__main__":
    sys.exit(main())
