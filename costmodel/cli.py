"""dsq-cost: what a precision configuration costs. This file parses; commands/ answers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from costmodel.shipped import DEFAULT_HARDWARE, profile_names
from costmodel.workloads import REGISTRY

EXAMPLES = {
    "": """\
examples:
  dsq-cost estimate "[16,4,4,16]" fixed:[16,16,16,16]
  dsq-cost estimate --history run/dsq_history.json
  dsq-cost table
  dsq-cost roofline "[16,4,4,16]" "[2,2,2,16]" --picture roofline.png
  dsq-cost sweep --q0 2:16 --q1 2:16 --q2 2:16 --q3 8:16 --csv --output sweep.csv
  dsq-cost explain "[16,4,4,16]" --workload opt_1.3b""",
    "estimate": """\
examples:
  dsq-cost estimate "[16,4,4,16]" "[2,2,2,16]" fixed:[16,16,16,16]
  dsq-cost estimate "[16,4,4,16]" --workload opt_1.3b --hardware h100
  dsq-cost estimate "[8,4,4,16]" --workload path/to/config.json --sequences 8 --target-length 1024 --json
  dsq-cost estimate "[16,4,4,16]" --profile paper
  dsq-cost estimate --history run/dsq_history.json --profile paper""",
    "table": """\
examples:
  dsq-cost table
  dsq-cost table 7 --hardware h100
  dsq-cost table 1 --csv --output table1.csv""",
    "roofline": """\
examples:
  dsq-cost roofline "[16,4,4,16]" "[2,2,2,16]" fixed:[16,16,16,16] --picture roofline.png
  dsq-cost roofline float:[16,16,16,16] --workload opt_1.3b --hardware h200 --picture opt.svg""",
    "sweep": """\
examples:
  dsq-cost sweep --picture front.png
  dsq-cost sweep --q0 2:16,32 --q1 2:16,32 --q2 2:16,32 --q3 16,32 --csv --output sweep.csv
  dsq-cost sweep --hardware msfp-accelerator --objectives time,stash,noise""",
    "explain": """\
examples:
  dsq-cost explain "[16,4,4,16]"
  dsq-cost explain "[16,4,4,16]" --operation fc1 --workload opt_1.3b
  dsq-cost explain "[2,2,2,16]" --profile paper --csv""",
}
PRECISION_HELP = "[q0,q1,q2,q3], or with its own format: bfp:[16,4,4,16], fixed:[16,16,16,16], float:[16,16,16,16]"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0, or 2 after one line on stderr for bad input."""
    arguments = parser().parse_args(argv)
    from costmodel import commands

    try:
        commands.run(arguments)
    except ValueError as error:
        print(f"dsq-cost {arguments.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) has gone: nothing left to say
    return 0


def parser() -> Parser:
    top = Parser(
        prog="dsq-cost",
        description="What a training precision [q0,q1,q2,q3] costs: DRAM traffic, arithmetic, roofline.",
    )
    _examples(top, "")
    commands = top.add_subparsers(dest="command", required=True, metavar="command", parser_class=Parser)

    estimate = _command(commands, "estimate", "cost one or more precisions, or a finished run from its history")
    estimate.add_argument("precision", nargs="*", help=PRECISION_HELP)
    estimate.add_argument(
        "--history",
        metavar="FILE",
        help="JSON record of work per level (dsq.PrecisionScheduler.history); layers that its exclude matches count as "
        "unconverted, or those of --exclude where that is given",
    )
    _profile(estimate)

    table = _command(commands, "table", "the paper's tables 1, 6 and 7 beside ours, with residuals", workload=False)
    table.add_argument("table", nargs="*", type=int, metavar="number", help="1, 6, 7 (default: all)")
    table.add_argument(
        "--hardware", default=DEFAULT_HARDWARE, metavar="NAME|FILE", help=f"for table 7 (default: {DEFAULT_HARDWARE})"
    )

    roofline = _command(
        commands, "roofline", "intensity, bound and time floor of each operation class, and the picture"
    )
    roofline.add_argument("precision", nargs="+", help=PRECISION_HELP)
    roofline.add_argument("--picture", metavar="FILE", help="write the roofline as .png or .svg")

    sweep = _command(commands, "sweep", "cost all configurations in a range and find the Pareto front")
    for q, default in (("q0", "2:16"), ("q1", "2:16"), ("q2", "2:16"), ("q3", "8:16")):
        sweep.add_argument(
            f"--{q}", default=default, metavar="RANGE", help=f"widths such as 4, 2:8 or 2:16,32 (default: {default})"
        )
    sweep.add_argument(
        "--objectives",
        default="dram,noise",
        help="what the front trades: two or more of dram, arithmetic, stash, time, noise (default: dram,noise)",
    )
    sweep.add_argument("--picture", metavar="FILE", help="write all points and the front as .png or .svg")

    explain = _command(commands, "explain", "one configuration, tensor by tensor: where each byte goes")
    explain.add_argument("precision", help=PRECISION_HELP)
    explain.add_argument("--operation", metavar="REGEX", help="only operations whose name matches")
    _profile(explain)
    return top


def _command(commands: argparse._SubParsersAction, name: str, summary: str, workload: bool = True) -> Parser:  # type: ignore[type-arg]
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    _examples(command, name)
    command.set_defaults(parser=command)
    if workload:
        _workload(command)
        _format(command)
    out = command.add_argument_group("output")
    kinds = out.add_mutually_exclusive_group()
    kinds.add_argument("--json", action="store_true", help="JSON instead of a table")
    kinds.add_argument("--csv", action="store_true", help="CSV instead of a table (the first table)")
    out.add_argument("--output", "-o", metavar="FILE", help="write there instead of to the terminal")
    return command


def _examples(command: argparse.ArgumentParser, name: str) -> None:
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = EXAMPLES[name]


def _profile(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--profile",
        choices=("first-principles", "paper"),
        default="first-principles",
        help="first-principles: tensors actually moved; paper: the calibrated model of tables 1 and 6",
    )


def _workload(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("workload and hardware")
    default = next(iter(REGISTRY))
    group.add_argument(
        "--workload",
        default=default,
        metavar="NAME|FILE",
        help=f"{', '.join(REGISTRY)}; or a Hugging Face config.json; or a workload file of dsq.workload.trace "
        f"(default: {default})",
    )
    group.add_argument("--sequences", type=int, metavar="N", help="sequences a batch (default: the workload's)")
    group.add_argument("--source-length", type=int, metavar="N", help="encoder tokens a sequence")
    group.add_argument("--target-length", type=int, metavar="N", help="decoder tokens a sequence")
    group.add_argument(
        "--hardware",
        default=DEFAULT_HARDWARE,
        metavar="NAME|FILE",
        help=f"{', '.join(profile_names())}, or a .toml file (default: {DEFAULT_HARDWARE})",
    )
    group.add_argument(
        "--gemms-only",
        action="store_true",
        help="leave out softmax, norms, activations, embeddings, loss and optimiser",
    )
    group.add_argument("--exclude", metavar="REGEX", help="layers left unconverted, e.g. output_projection")
    group.add_argument("--quantise-attention", action="store_true", help="quantise attention's two products too")
    group.add_argument(
        "--fused-attention", action="store_true", help="attention scores stay on chip and are recomputed"
    )


def _format(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("format")
    group.add_argument(
        "--format", default="bfp", choices=("bfp", "fixed", "float"), help="of precisions that name none (default: bfp)"
    )
    group.add_argument("--box", type=int, default=16, help="values that share an exponent (default: 16)")
    group.add_argument("--exponent-bits", type=int, default=8, help="width of the shared exponent (default: 8)")
    group.add_argument(
        "--box-axis",
        default="contraction",
        choices=("contraction", "last"),
        help="axis of the boxes (default: contraction)",
    )


if __name__ == "__main__":
    sys.exit(main())
