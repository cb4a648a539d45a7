"""python -m analysis.bench PART: what a part costs, as a table on the terminal and a CSV."""

import argparse
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

from analysis.bench import process
from analysis.timing import TRUSTED_STRAY, Race
from dsq.command import OneLineParser, as_csv, count, guarded, make_folder, table, write_text

#: part -> where its races are, imported when asked for: a function of rounds
RACES = {
    "kernels": "kernels.against_copies",
    "product": "kernels.product",
    "step": "steps.six_blocks",
    "policies": "steps.policies",
}
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
        import torch

        torch.set_num_threads(options.threads)
    module, function = RACES[part].split(".")
    work = getattr(import_module(f"analysis.bench.{module}"), function)
    found: list[dict[str, Any]] = []
    for race in work(options.rounds):
        print(f"{race.title}: ratios to {race.baseline}\n{table(rows(race), SHOWN)}\n{verdict(race)}\n", flush=True)
        found += rows(race)
    write_text(out / f"{part}.csv", as_csv(found))
    print(f"written: {out / part}.csv")


def rows(race: Race) -> list[dict[str, Any]]:
    """A row for each contestant."""
    return [
        {
            "race": race.title,
            "contestant": result.name,
            "ms": 1000 * result.median_seconds,
            "ratio": result.ratio,
            "best/best": result.best_ratio,
            "stray": result.stray,
            "baseline": race.baseline,
            "trusted": race.trusted,
        }
        for result in race.results
    ]


def verdict(race: Race) -> str:
    """Say by the baseline's ratio to itself whether the machine was quiet."""
    measured = f"{race.baseline} against itself: {race.control.ratio:.3f}, stray {race.stray:.0%}"
    if race.trusted:
        return measured
    return f"TOO NOISY TO TRUST: {measured} (more than {TRUSTED_STRAY:.0%}); stop what else runs here and repeat"


if __name__ == "__main__":
    sys.exit(main())
