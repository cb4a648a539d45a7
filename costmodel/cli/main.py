"""dsq-cost: what a precision configuration costs. This file parses; commands/NAME.py answers.

Nothing here needs numpy, for --help to be quick.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TypeAlias, get_args

from costmodel.cli import format_options
from costmodel.hardware.shipped import DEFAULT_HARDWARE, profile_names
from costmodel.workloads.named import names
from dsq import __version__
from dsq.command.files import check_writable, write_text
from dsq.command.parser import OneLineParser, guarded
from dsq.formats import DEFAULT, BoxAxis

#: arguments of each command that its help shows; the first of each is shown by dsq-cost --help
EXAMPLES = {
    "estimate": (
        '"[16,4,4,16]" "[2,2,2,16]" fixed:[16,16,16,16]',
        '"[16,4,4,16]" --workload opt_1.3b --hardware h100',
        '"[8,4,4,16]" --workload config.json --sequences 8 --target-length 1024 --json',
        '"[4,4,4,16]" "[16,4,4,16]" --rise-at 0.8 --profile paper',
        "--history run/dsq_history.json --profile paper",
    ),
    "plan": (
        "--workload opt_1.3b --hardware h100",
        "--workload path/to/config.json --sequences 8 --fit 24GB",
        "--workload opt_1.3b --devices 8 --zero 3 --json",
    ),
    "table": ("", "7 --hardware h100", "1 --csv --output table1.csv"),
    "roofline": (
        '"[16,4,4,16]" "[2,2,2,16]" fixed:[16,16,16,16] --picture roofline.png',
        "float:[16,16,16,16] --workload opt_1.3b --hardware h200 --picture opt.svg",
    ),
    "calibrate": ("mine.toml",),
    "explain": (
        '"[16,4,4,16]" --workload opt_1.3b',
        '"[16,4,4,16]" --operation fc1',
        '"[2,2,2,16]" --profile paper --csv',
    ),
}
#: what the paper's tables are relative to
FIXED_32 = "fixed:[32,32,32,32]"
#: what training runs at today
BF16 = "float:[16,16,16,16]"
PRECISION_HELP = "[q0,q1,q2,q3], or with its own format: bfp:[16,4,4,16], fixed:[16,16,16,16], float:[16,16,16,16]"

Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0, or 2 after one line on stderr for bad input."""
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:  # argparse would blame dsq-cost itself, not the command that does not know them
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return guarded(f"dsq-cost {arguments.command}", lambda: answer(arguments))


def answer(arguments: argparse.Namespace) -> None:
    """Print or write what one command finds. Raises ValueError for bad input, before anything is written."""
    picture = getattr(arguments, "picture", None)
    for path in (arguments.output, picture):
        if path:
            check_writable(path)
    if picture and not picture.endswith((".png", ".svg")):
        raise ValueError(f"picture {picture} must end in .png or .svg")
    if picture and arguments.output and os.path.realpath(picture) == os.path.realpath(arguments.output):
        raise ValueError(f"output {arguments.output} is the picture too: name two files")
    report = import_module(f"costmodel.cli.commands.{arguments.command}").run(arguments)
    text = report.json() if arguments.json else report.csv() if arguments.csv else report.table()
    if arguments.output:
        write_text(arguments.output, text)
    else:
        sys.stdout.write(text)


def parser() -> OneLineParser:
    top = OneLineParser(
        prog="dsq-cost",
        description="What a training precision [q0,q1,q2,q3] costs: DRAM traffic, arithmetic, roofline.",
    )
    _examples(top, [f"{name} {examples[0]}" for name, examples in EXAMPLES.items()])
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")

    for add in (_estimate, _table, _plan, _roofline, _calibrate, _explain):
        add(commands)
    return top


def _estimate(commands: Commands) -> None:
    command = _command(commands, "estimate", "cost one or more precisions, or a finished run from its history")
    command.add_argument("precision", nargs="*", help=PRECISION_HELP)
    text = "JSON record of work per level (dsq.PrecisionScheduler.history); layers that its exclude matches count as "
    text += "unconverted, or those of --exclude where that is given"
    command.add_argument("--history", metavar="FILE", help=text)
    text = "the precisions are the levels of a run, each but the first from such a fraction of it on: 0.8, or '0.2 0.8'"
    command.add_argument("--rise-at", metavar="FRACTIONS", help=text)
    _relative(command)
    _profile(command)


def _table(commands: Commands) -> None:
    summary = "the paper's tables 1, 6 and 7 beside ours, with residuals"
    command = _command(commands, "table", summary, workload=False)
    command.add_argument("table", nargs="*", type=int, metavar="number", help="1, 6, 7 (default: all)")
    _hardware(command, "for table 7")


def _plan(commands: Commands) -> None:
    summary = "does it fit, how fast is it, what bounds it: memory, time, largest batch, by method of training"
    command = _command(commands, "plan", summary)
    text = "instead of the usual methods: " + PRECISION_HELP
    command.add_argument("precision", nargs="*", help=text)
    text = "memory of a device, e.g. 80GB or 24GiB (default: the hardware's)"
    command.add_argument("--fit", metavar="SIZE", help=text)
    text = "devices, each with its own batch (default: 1)"
    command.add_argument("--devices", type=int, default=1, metavar="N", help=text)
    text = "memory over the step of bf16, or of the first precision, as .png or .svg"
    command.add_argument("--picture", metavar="FILE", help=text)
    text = "what the devices share: 1 optimiser, 2 and gradients, 3 and parameters (ZeRO; default: 0, nothing)"
    command.add_argument("--zero", type=int, choices=range(4), default=0, help=text)


def _roofline(commands: Commands) -> None:
    summary = "intensity, bound and time floor of each operation class, and the picture"
    command = _command(commands, "roofline", summary)
    command.add_argument("precision", nargs="+", help=PRECISION_HELP)
    text = "a row and a dot for each operation (fc1, softmax) instead of each class"
    command.add_argument("--per-operation", action="store_true", help=text)
    command.add_argument("--picture", metavar="FILE", help="write the roofline as .png or .svg")


def _calibrate(commands: Commands) -> None:
    summary = "measure this machine, in under two minutes, as a hardware file for --hardware"
    command = _command(commands, "calibrate", summary, workload=False)
    command.add_argument("file", help="the .toml file to write")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")


def _explain(commands: Commands) -> None:
    command = _command(commands, "explain", "one configuration, tensor by tensor: where each byte goes")
    command.add_argument("precision", help=PRECISION_HELP)
    command.add_argument("--operation", metavar="REGEX", help="only operations whose name matches")
    _profile(command)


def _command(commands: Commands, name: str, summary: str, workload: bool = True) -> OneLineParser:
    command = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    _examples(command, [f"{name} {example}" for example in EXAMPLES[name]])
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


def _examples(command: argparse.ArgumentParser, examples: list[str]) -> None:
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = "\n".join(["examples:", *(f"  dsq-cost {example}".rstrip() for example in examples)])


def _relative(command: argparse.ArgumentParser, default: str = FIXED_32) -> None:
    text = f"what figures are relative to, e.g. {BF16} (default: {default})"
    command.add_argument("--relative-to", default=default, metavar="PRECISION", help=text)


def _profile(command: argparse.ArgumentParser) -> None:
    text = "first-principles: tensors actually moved; paper: the calibrated model of tables 1 and 6"
    profiles = ("first-principles", "paper")
    command.add_argument("--profile", choices=profiles, default=profiles[0], help=text)


def _hardware(group: "argparse._ActionsContainer", purpose: str) -> None:
    text = f"{purpose} (default: {DEFAULT_HARDWARE})"
    group.add_argument("--hardware", default=DEFAULT_HARDWARE, metavar="NAME|FILE", help=text)
    text = "datasheet rates: every efficiency of the hardware file counts as 1"
    group.add_argument("--datasheet", action="store_true", help=text)


def _workload(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("workload and hardware")
    known, default = ", ".join(names()), names()[0]
    text = f"{known}; or a Hugging Face config.json; or a workload file of dsq.workload.trace (default: {default})"
    group.add_argument("--workload", default=default, metavar="NAME|FILE", help=text)
    group.add_argument("--sequences", type=int, metavar="N", help="sequences a batch (default: the workload's)")
    group.add_argument("--source-length", type=int, metavar="N", help="encoder tokens a sequence")
    group.add_argument("--target-length", type=int, metavar="N", help="decoder tokens a sequence")
    _hardware(group, f"{', '.join(profile_names())}, or a .toml file")
    text = "leave out softmax, norms, activations, embeddings, loss and optimiser"
    group.add_argument("--gemms-only", action="store_true", help=text)
    group.add_argument("--exclude", metavar="REGEX", help="layers left unconverted, e.g. output_projection")
    group.add_argument("--freeze", metavar="REGEX", help="layers whose parameters are not trained")
    group.add_argument("--quantise-attention", action="store_true", help="quantise attention's two products too")
    text = "bits of what no quantiser touches (default: 16 where q0..q3 fit); 32: a model in float32 around the layers"
    group.add_argument("--container", type=int, choices=(16, 32), help=text)
    attention = group.add_mutually_exclusive_group()
    text = "attention's scores stay on chip and are made again (default for models of transformers)"
    attention.add_argument("--fused-attention", action="store_true", help=text)
    text = "attention's scores are stored (default for fairseq's models)"
    attention.add_argument("--eager-attention", action="store_true", help=text)


def _format(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("format")
    text = f"of precisions that name none (default: {DEFAULT})"
    group.add_argument("--format", default=DEFAULT, choices=format_options.names(), help=text)
    for field, defaults in format_options.all_sizes().items():
        flag, stated = field.replace("_", "-"), ", ".join(f"{default} in {name}" for name, default in defaults.items())
        group.add_argument(f"--{flag}", type=int, metavar="N", help=f"{flag.replace('-', ' ')} (default: {stated})")
    text = "axis of the boxes (default: contraction)"
    group.add_argument("--box-axis", default="contraction", choices=get_args(BoxAxis), help=text)
