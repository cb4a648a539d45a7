"""python -m analysis.bench PART: what a part costs, as a table on the terminal, a CSV and, of times, a picture."""

import argparse
import sys
from collections.abc import Callable, Iterable
from importlib import import_module
from pathlib import Path

from analysis.bench import process
from analysis.bench.report import text, write
from analysis.timing import Race
from dsq.command.files import make_folder
from dsq.command.parser import OneLineParser, count, guarded

#: modules of this folder, imported when asked for: each has races(rounds) -> iterable of Race, or run(out). process,
#: which has arguments of its own, stands beside them
PARTS = (
    "kernels",
    "formats",
    "product",
    "step",
    "narrow",
    "tiny",
    "gpt",
    "policies",
    "narrow_policies",
    "stash",
    "cost",
)


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.bench", description=__doc__)
    common = OneLineParser(add_help=False)
    common.add_argument("--rounds", type=count, default=15, help="turns of each contestant (default: 15)")
    common.add_argument("--threads", type=count, help="PyTorch's threads (default: as they are; process: 1)")
    common.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the CSV and the picture")
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART", help=", ".join((*PARTS, "process")))
    for part in PARTS:
        parts.add_parser(part, parents=[common])
    process.add_arguments(parts.add_parser("process", parents=[common], description=process.__doc__))
    options = parser.parse_args(argv)
    if options.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {options.rounds}")
    return guarded(parser.prog, lambda: run(options))


def run(options: argparse.Namespace) -> None:
    part, rounds, threads, out = options.part, options.rounds, options.threads, options.out
    make_folder(out)
    if part == "process":
        return process.run(options)
    if threads is not None:
        import torch

        torch.set_num_threads(threads)
    module = import_module(f"analysis.bench.{part}")
    if not hasattr(module, "races"):
        return module.run(out)
    races: Callable[[int], Iterable[Race]] = module.races
    done = []
    for race in races(rounds):
        print(text([race]), flush=True)
        done.append(race)
    for path in write(done, out, part):
        print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
