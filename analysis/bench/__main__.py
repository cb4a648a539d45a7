"""python -m analysis.bench PART: what a part costs, as a table on the terminal and a CSV."""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch

from analysis import make_folder
from analysis.bench import comparisons, process
from analysis.timing import TRUSTED_SPREAD
from dsq.command import OneLineParser, as_csv, count, guarded, table, write_text

#: part -> its races, of rounds
RACES = {
    "kernels": comparisons.against_copies,
    "step": comparisons.six_blocks,
    "policies": comparisons.policies,
    "formats": comparisons.formats,
}
TOO_NOISY = (
    f"TOO NOISY TO TRUST: the baseline varies by over {TRUSTED_SPREAD:.0%} from itself; stop what else runs and repeat"
)
SHOWN = {"contestant": "", "ms": ".4g", "ratio": ".3f", "best/best": ".3f", "stray": ".0%"}


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.bench", description=__doc__)
    common = OneLineParser(add_help=False)
    common.add_argument("--rounds", type=count, default=15, help="turns of each contestant (default: 15)")
    common.add_argument("--threads", type=count, help="PyTorch's threads (default: as they are; process: 1)")
    common.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the CSV")
    names = (*RACES, "process")
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART", help=", ".join(names))
    for part in RACES:
        parts.add_parser(part, parents=[common])
    process.add_arguments(parts.add_parser("process", parents=[common], description=process.__doc__))
    options = parser.parse_args(argv)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    return guarded(parser.prog, lambda: run(options))


def run(options: argparse.Namespace) -> None:
    part, out = options.part, options.out
    make_folder(out)
    if part == "process":
        return process.run(options)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    results: list[dict[str, Any]] = []
    for race in RACES[part](options.rounds):
        print(f"{race.title}: ratios to {race.baseline}\n{table(race.rows, SHOWN)}\n", flush=True)
        if not race.trusted:
            print(f"{TOO_NOISY}\n", flush=True)
        results += [
            {"race": race.title, **row, "baseline": race.baseline, "trusted": race.trusted} for row in race.rows
        ]
    write_text(out / f"{part}.csv", as_csv(results))
    print(f"written: {out / part}.csv")


if __name__ == "__main__":
    sys.exit(main())
