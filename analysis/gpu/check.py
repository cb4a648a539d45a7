"""Hold the GPU kernels against the reference, and time them against their ceilings.

    python -m analysis.gpu.check [--part PART]... [--out DIR]

runs from a checkout with torch, triton, numpy and tabulate, all parts on a GPU well within ten minutes:

    agreement   every kernel against the reference on the CPU, bit for bit, over shapes and values full of edges
    products    every way to multiply quantised operands, beside PyTorch's float32 (TF32 off) and bfloat16
    steps       six transformer blocks, forward and backward, of each format and level: time, and the allocator's peak
    compiled    two such blocks under torch.compile
    bandwidth   every kernel against a device-to-device copy that moves the same bytes

Without a GPU the same parts run through Triton's interpreter on tiny tensors, which proves that they agree and run; of
times, which then mean nothing, none is shown. With --out, each part's table is written to DIR/gpu_PART.csv when it is
done. Exits 1 where a kernel disagrees.
"""

import importlib.metadata
import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from pathlib import Path

import torch

from dsq.command import OneLineParser, Record, as_csv, fail, guarded, make_folder, table, write_text

PROG = "python -m analysis.gpu.check"
#: by name, the module and the function of each part: (machine) -> rows
PARTS = {
    "agreement": ("agreement", "agreement"),
    "products": ("products", "multiply"),
    "steps": ("step", "steps"),
    "compiled": ("step", "compiled_steps"),
    "bandwidth": ("bandwidth", "bandwidth"),
}


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="only this part (may be given again); default: all"
    )
    parser.add_argument("--out", type=Path, help="folder for the tables, as CSV")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None:
        fail(PROG, "triton is not installed")
    if args.out and (refused := guarded(PROG, lambda: make_folder(args.out))):
        return refused
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which no module has done yet
    from analysis.gpu.machine import this_machine

    machine = this_machine()
    print(f"machine: {machine.name}; torch {torch.__version__}, triton {importlib.metadata.version('triton')}")
    wrong = False
    for part in args.part or PARTS:
        begun = time.perf_counter()
        module, function = PARTS[part]
        measure: Callable[..., Iterable[Record]] = getattr(import_module(f"analysis.gpu.{module}"), function)
        rows = [{**row, "machine": machine.name} for row in measure(machine)]
        print(f"\n{part}: {len(rows)} rows in {time.perf_counter() - begun:.0f} s", flush=True)
        if part == "agreement":
            disagreeing = [row for row in rows if row["disagree"]]
            wrong = bool(disagreeing)
            print(f"{len(disagreeing)} disagree with the reference")
            _show(disagreeing)
        elif machine.is_gpu:
            _show(rows)
        if args.out and (machine.is_gpu or part == "agreement"):
            write_text(args.out / f"gpu_{part}.csv", as_csv(rows))
    return int(wrong)


def _show(rows: Sequence[Record]) -> None:
    if rows:
        print(table([{name: value for name, value in row.items() if name != "machine"} for row in rows]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
