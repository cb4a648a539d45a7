"""Print what a step's kernels should take on a GPU, on paper: no GPU is needed, and nothing is measured.

    python -m analysis.gpu.expected [--check build/gpu_check]

A launch takes what is longest of 5 us, its bytes at the bandwidth that programs reach, and its multiply-accumulates at
the rate that they reach (dsq-cost's hardware files). Bytes and products are counted (launches.py). With boxes of 16 an
int8 product uses half of its units, and takes three instructions for each box of each sum; with one step for 128
values, which few codes of 8 bits allow, it does neither. What codecs compute is left out.

``--check``: rows that analysis.gpu.check measured, beside what the first of CARDS should take.
"""

import json
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch

from analysis.gpu.launches import DeviceCall, block, codecs, least, linear, step
from costmodel.hardware.hardware import MICRO, Hardware, load_hardware
from dsq.command import OneLineParser, Record, table
from dsq.precision import DEFAULT_LEVELS

PROG = "python -m analysis.gpu.expected"
CARDS = ("a100-80gb", "h100", "rtx-4090")
LEVELS = str(DEFAULT_LEVELS[0])
LAUNCH = 5 * MICRO
TOKENS, WIDTH = 8192, 4096
#: of a block, whose sequences have 1,024 tokens
BLOCK = (8, 1024, 1024)
INT8 = "int8 128x128"
#: instructions of the vector units for a box of an int8 sum: to float32, times one step, times the other and add
STEP_INSTRUCTIONS = 3
BOX, RUN = 16, 128


def seconds(launch: DeviceCall, card: Hardware, span: int = BOX) -> tuple[float, str]:
    """The time of a launch, and what bounds it; ``span``: values that an int8 product sums before it takes a step."""
    times = {"launch": LAUNCH, "bandwidth": launch.moved / card.bandwidth}
    if launch.products:
        kind = "int8" if launch.in_triton else "bf16"
        rate = next(peak.flops for peak in card.peaks if peak.datatype == kind)
        times[kind] = 2 * launch.products / rate * (max(1, 32 / span) if launch.in_triton else 1)
        if launch.in_triton:
            times["steps"] = STEP_INSTRUCTIONS * launch.products / span / (card.vector_flops / 2)
    bound = max(times, key=lambda name: times[name])
    return times[bound], bound


def total(launches: Iterable[DeviceCall], card: Hardware, span: int = BOX) -> float:
    return sum(seconds(launch, card, span)[0] for launch in launches)


@cache
def linear_step(width: int, gemm: str | None) -> list[DeviceCall]:
    """Return the launches of a linear layer's step in bfloat16; a plain one's where ``gemm`` is None."""
    return step(linear(width, gemm and LEVELS).to(torch.bfloat16), (TOKENS, width), gemm).launches


def counts() -> Iterator[Record]:
    """A row a step: launches and bytes."""
    for what, make, shape in (("linear", linear, (TOKENS, WIDTH)), ("block, all packed", block, BLOCK)):
        for dtype in (torch.float32, torch.bfloat16):
            for gemm in (None, "bfloat16", INT8):
                found = step(make(shape[-1], gemm and LEVELS).to(dtype), shape, gemm).launches
                moved = sum(it.moved for it in found)
                row: dict[str, Any] = {"step": what, "dtype": str(dtype).removeprefix("torch.")}
                row |= {"by": gemm or "plain PyTorch", "launches": len(found)}
                row |= {"in Triton": sum(it.in_triton for it in found), "GB": f"{moved / 1e9:.2f}"}
                linears = gemm and what == "linear"
                row["x least"] = f"{moved / least(TOKENS, WIDTH, LEVELS, dtype):.1f}" if linears else ""
                yield row


def times(card: Hardware) -> Iterator[Record]:
    """A row a kernel or step: its expected time on a card in bfloat16, and what bounds most of it."""
    for name, launches, few in codecs(TOKENS, WIDTH, torch.bfloat16):
        moved = sum(it.moved for it in launches)
        yield {**_row(card, name, launches), "x least bytes": f"{moved / few:.2f}"}
    for by, gemm, span in (
        ("plain bf16", None, BOX),
        ("dsq by bf16 products", "bfloat16", BOX),
        ("dsq by int8, a step for 16", INT8, BOX),
        ("dsq by int8, a step for 128", INT8, RUN),
    ):
        yield _row(card, f"linear, forward and backward, {by}", linear_step(WIDTH, gemm), span)


def _row(card: Hardware, name: str, launches: list[DeviceCall], span: int = BOX) -> Record:
    by_bound: dict[str, float] = {}
    for launch in launches:
        taken, bound = seconds(launch, card, span)
        by_bound[bound] = by_bound.get(bound, 0) + taken
    whole = sum(by_bound.values())
    most = max(by_bound, key=lambda bound: by_bound[bound])
    return {"": name, "us": f"{whole / MICRO:,.0f}", "bound": f"{most} ({by_bound[most] / whole:.0%})"}


def wins_from(card: Hardware, span: int) -> str:
    """The least width, of powers of two, at which a square linear layer by int8 should beat bf16."""
    for width in (2**power for power in range(8, 16)):
        if total(linear_step(width, INT8), card, span) < total(linear_step(width, None), card, span):
            return f"{width:,}"
    return "none"


def beside(card: Hardware, folder: Path) -> Iterator[Record]:
    """Rows of the check's bandwidth and products with what they should take."""
    for name in ("bandwidth", "products"):
        path = folder / f"{name}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            row = json.loads(line)
            if "us" in row:
                expected = max(LAUNCH, 1e6 * row["MB moved"] / card.bandwidth) / MICRO
                yield {"": row["name"], "expected us": f"{expected:.0f}", "measured us": f"{row['us']:.0f}"}
            elif "ms" in row and (sizes := re.match(r"(\d+)x(\d+)x(\d+) .*(bfloat16|int8)", row["name"])):
                rows, columns, depth = map(int, sizes.groups()[:3])
                ours = ", int8" in row["name"]
                moved = 2 * (rows * depth + depth * columns) + 4 * rows * columns
                expected = seconds(DeviceCall("", moved, ours, rows * columns * depth), card)[0] / MICRO
                yield {"": row["name"], "expected us": f"{expected:.0f}", "measured us": f"{1000 * row['ms']:.0f}"}


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--check", type=Path, help="folder of analysis.gpu.check's results")
    args = parser.parse_args(argv)
    cards = [load_hardware(name) for name in CARDS]
    print(f"Counted: a linear layer of {WIDTH:,} x {WIDTH:,} at {TOKENS:,} tokens; a block of width 1,024\n")
    print(table(list(counts())))
    for card in cards:
        print(f"\nExpected, not measured: {card.name}, values in bfloat16\n")
        print(table(list(times(card))))
        won = [wins_from(card, span) for span in (BOX, RUN)]
        print(f"\nint8 beats bf16 from width: a step for 16 values {won[0]}, a step for 128 values {won[1]}")
    if args.check:
        print(f"\nExpected beside measured: {cards[0].name}\n")
        print(table(list(beside(cards[0], args.check))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
