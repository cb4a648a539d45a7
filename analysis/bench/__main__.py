"""python -m analysis.bench PART: what a part costs, as a table on the terminal, a CSV and, of times, a picture."""

import argparse
import sys
from importlib import import_module
from pathlib import Path

from analysis.bench import process
from dsq.command import OneLineParser, count, guarded, make_folder

#: part -> where its races are, imported when asked for: a function of rounds
RACES = {
    "kernels": "kernels.against_copies",
    "product": "kernels.product",
    "step": "steps.six_blocks",
    "narrow": "steps.narrow",
    "formats": "steps.formats",
    "tiny": "steps.tiny",
    "policies": "steps.policies",
    "narrow_policies": "steps.narrow_policies",
    "gpt": "steps.gpt_steps",
}
#: part -> a function of the folder that its CSV goes to
TABLES = {"stash": "stash.run", "format_errors": "kernels.format_errors"}


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.bench", description=__doc__)
    common = OneLineParser(add_help=False)
    common.add_argument("--rounds", type=count, default=15, help="turns of each contestant (default: 15)")
    common.add_argument("--threads", type=count, help="PyTorch's threads (default: as they are; process: 1)")
    common.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of the CSV and the picture")
    names = (*RACES, *TABLES, "process")
    parts = parser.add_subparsers(dest="part", required=True, metavar="PART", help=", ".join(names))
    for part in (*RACES, *TABLES):
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
    module, function = (RACES | TABLES)[part].split(".")
    work = getattr(import_module(f"analysis.bench.{module}"), function)
    if part in TABLES:
        return work(out)
    from analysis.bench.report import text, write

    races = []
    for race in work(options.rounds):
        print(text([race]), flush=True)
        races.append(race)
    for path in write(races, out, part):
        print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
