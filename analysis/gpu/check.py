"""Hold the GPU kernels against the reference, and time them against their ceilings.

    python -m analysis.gpu.check [--part PART]... [--out DIR]

runs from a checkout with torch, triton, numpy and tabulate. On a machine with a GPU:

    agreement   every kernel against the reference on the CPU, bit for bit, over shapes and values full of edges
    bandwidth   every kernel against a device-to-device copy that moves the same bytes
    step        six transformer blocks, forward and backward: float32 (TF32 off), bfloat16 autocast, and dsq

Without one it runs the agreement alone, on Triton's interpreter, and says so. With --out, each part's table is written
to DIR/gpu_PART.csv. Exits 1 where a kernel disagrees.
"""

import argparse
import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from dsq.command.files import make_folder, write_text
from dsq.command.parser import OneLineParser, fail, guarded
from dsq.command.table import Record, as_csv, table
from dsq.formats import BFP, Layout
from dsq.kernels.conformance import Case, cases, disagreements, gemm_disagreements, mask_disagreements
from dsq.kernels.triton import codec
from dsq.kernels.triton.backend import TRITON

PROG = "python -m analysis.gpu.check"
NOT_ON_GPU = "not run on a GPU (Triton's interpreter on the CPU)"


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--part", action="append", choices=PARTS, help="only this part (may be given again); default: all"
    )
    parser.add_argument("--out", type=Path, help="folder for the tables, as CSV")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("triton") is None:
        fail(PROG, "triton is not installed")
    if args.out and (refused := guarded(PROG, lambda: make_folder(args.out))):
        return refused
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, which no module has done yet
    machine = torch.cuda.get_device_name() if on_gpu else NOT_ON_GPU
    print(f"machine: {machine}; torch {torch.__version__}, triton {importlib.metadata.version('triton')}")

    wrong = False
    for part in args.part or PARTS:
        if not on_gpu and part != "agreement":
            print(f"\n{part}: not run on a GPU, there is none here")
            continue
        rows = [{**row, "machine": machine} for row in PARTS[part](torch.device("cuda" if on_gpu else "cpu"))]
        wrong = wrong or any(row.get("disagree") for row in rows)
        _report(part, rows)
        if args.out:
            write_text(args.out / f"gpu_{part}.csv", as_csv(rows))
    return int(wrong)


def agreement(device: torch.device) -> Iterator[Record]:
    """A row a case: what differs from the reference, by name ("" where nothing does)."""
    yield from _compared("", device, cases(TRITON.formats))
    yield from _compared_masks("", device)
    with _wide_offsets():
        yield from _compared_masks("64-bit offsets: ", device)
        yield from _compared("64-bit offsets: ", device, list(cases(TRITON.formats))[::7])
    if device.type == "cuda":
        yield from _compared("", device, cases(TRITON.formats, rows=200, columns=1100))
        yield _beyond_32_bits()
        for case, wrong in gemm_disagreements(TRITON, device):
            yield {"case": case, "disagree": wrong}


def _compared(prefix: str, device: torch.device, tried: Iterable[Case]) -> Iterator[Record]:
    for case in tried:
        yield {"case": f"{prefix}{case}", "disagree": " ".join(disagreements(TRITON, case, device))}


def _compared_masks(prefix: str, device: torch.device) -> Iterator[Record]:
    for case, wrong in mask_disagreements(TRITON, device):
        yield {"case": f"{prefix}{case}", "disagree": wrong}


@contextmanager
def _wide_offsets() -> Iterator[None]:
    """Inside, the kernels compute every offset in 64 bits, as they do for tensors of 2**30 values and more."""
    before, codec.WIDE = codec.WIDE, 0
    codec.launch_for.cache_clear()
    try:
        yield
    finally:
        codec.WIDE = before
        codec.launch_for.cache_clear()


def _beyond_32_bits() -> Record:
    """A tensor of over 2**31 values gives at its end the bytes that its last rows give alone."""
    fmt, rows, columns, last = BFP(4), 2**20 + 16, 2048, 16
    x = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    wrong = []
    for axis, dim in (("columns", -1), ("rows", 0)):
        whole, end = Layout.of(x.shape, dim), Layout.of((last, columns), dim)
        codes, scales = codec.pack(x, fmt, whole, None)
        codes_end, scales_end = codec.pack(x[-last:], fmt, end, None)
        y_end = codec.unpack(codes, scales, fmt, whole, torch.bfloat16)[:, -last:]
        alike = (
            torch.equal(codes[-last:], codes_end),
            torch.equal(scales.view(-1)[-scales_end.numel() :], scales_end.view(-1)),
            torch.equal(y_end, codec.unpack(codes_end, scales_end, fmt, end, torch.bfloat16)),
        )
        names = ("codes", "scales", "unpack")
        wrong += [f"{name} (boxes along {axis})" for name, ok in zip(names, alike, strict=True) if not ok]
    return {"case": f"{rows}x{columns} values, bfloat16", "disagree": " ".join(wrong)}


def _bandwidth(device: torch.device) -> Iterator[Record]:
    from analysis.gpu.bandwidth import bandwidth

    return bandwidth()


def _step(device: torch.device) -> Iterator[Record]:
    from analysis.gpu.step import SIZES, measure_steps

    for size in SIZES:
        yield from measure_steps(size)


PARTS = {"agreement": agreement, "bandwidth": _bandwidth, "step": _step}


def _report(part: str, rows: Sequence[Record]) -> None:
    print(f"\n{part}")
    if part == "agreement":
        wrong = [row for row in rows if row["disagree"]]
        print(f"{len(rows)} cases, {len(wrong)} disagree with the reference")
        rows = wrong
    if rows:
        print(table([{name: value for name, value in row.items() if name != "machine"} for row in rows]))


if __name__ == "__main__":
    sys.exit(main())
