"""What rounding to a format costs: error and bias on normal values, without a model.

python -m analysis.bench.format_errors [--out FILE.csv]

error   |Q(x) - x| / |x| over 10^6 values of N(0, 1) in boxes of 16, rounded to nearest
slope   of Q(x) on x: below 1, values shrink
bias    of the mean of 64 stochastic roundings of one box set: |mean Q(x) - x| / |x|, and what their spread leaves;
        clipping at the largest code is what makes it more
"""

import sys
from typing import Any

import torch

from dsq.command.files import write_text
from dsq.command.parser import OneLineParser, guarded
from dsq.command.table import as_csv, table
from dsq.formats import FORMATS, Format, Layout, options
from dsq.packing import quantize

PROG = "python -m analysis.bench.format_errors"
BITS = (2, 3, 4, 8)
VALUES, ROUNDINGS = 1 << 20, 64


def row(fmt: Format) -> dict[str, Any]:
    """The figures of one format."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(VALUES // 16, 16, generator=generator)
    q = quantize(x, fmt)
    few = x[: VALUES // 256]
    drawn = torch.stack([quantize(few, fmt, rounding="stochastic", seed=seed) for seed in range(ROUNDINGS)])
    return {
        "format": fmt.name,
        "bits": fmt.bits,
        "stored": 8 * fmt.nbytes(Layout.of(tuple(x.shape), -1)) / x.numel(),
        "error": float((q - x).norm() / x.norm()),
        "slope": float((q * x).sum() / (x * x).sum()),
        "bias": float((drawn.mean(0) - few).norm() / few.norm()),
        "noise": float(drawn.std(0).norm() / few.norm() / ROUNDINGS**0.5),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog=PROG, description=__doc__)
    parser.add_argument("--out", metavar="FILE.csv", help="write the figures there too")
    given = parser.parse_args(arguments)

    def work() -> None:
        kinds = [kind for name, kind in FORMATS.items() if "box" in options(name)]
        rows = [row(kind(bits)) for kind in kinds for bits in BITS]
        shown = {"format": "", "bits": "", "stored": ".4f"} | dict.fromkeys(("error", "slope", "bias", "noise"), ".4f")
        print(table(rows, shown))
        if given.out:
            write_text(given.out, as_csv(rows))

    return guarded(PROG, work)


if __name__ == "__main__":
    sys.exit(main())
