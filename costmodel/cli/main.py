"""dsq-cost: what training costs, in memory, time and traffic. This file parses; commands/ answers.

Nothing here needs numpy, for --help to be quick.
"""

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TypeAlias

from costmodel.hardware.hardware import DEFAULT_HARDWARE, profile_names
from costmodel.model.methods import all_sizes, format_names
from costmodel.workloads.named import ADAPTED, DEFAULT_MODEL, names
from dsq import __version__
from dsq.command import OneLineParser, check_writable, guarded, write_text
from dsq.formats import DEFAULT

#: arguments of each command that its help shows; the first of each is shown by dsq-cost --help
EXAMPLES = {
    "plan": (
        "llama-3-8b --hardware rtx-4090 --lora 16 --tokens 2048",
        "path/to/config.json --sequences 8 --fit 24GB",
        "llama-2-7b --hardware h100 --devices 8 --zero 3 --json",
        'opt_1.3b "[4,4,4,8]" "[16,4,4,16]" --hardware a100-80gb',
    ),
    "estimate": (
        '"[16,4,4,16]" "[2,2,2,16]" fixed:[16,16,16,16]',
        '"[4,3,3,8] [8,4,4,8]" --rise-at 0.8 --profile paper',
    ),
    "table": ("", "7 --hardware h100", "1 --csv --output table1.csv"),
    "roofline": ('"[16,4,4,16]" "[2,2,2,16]" fixed:[16,16,16,16] --picture roofline.png',),
    "calibrate": ("mine.toml",),
    "trace": ("path/to/config.json traced.json --sequences 4 --tokens 512",),
}
#: command -> its file of commands/; those of a training step: step.py
MODULES = {"table": "table", "calibrate": "machine", "trace": "machine"}
PRECISION_HELP = "[q0,q1,q2,q3], or with its own format: bfp:[16,4,4,16], fixed:[16,16,16,16], float:[16,16,16,16]"

Commands: TypeAlias = "argparse._SubParsersAction[OneLineParser]"
Options: TypeAlias = "argparse._ActionsContainer"


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point. Returns 0, or 2 after one line on stderr for bad input."""
    arguments, unknown = parser().parse_known_args(argv)
    if unknown:  # argparse would blame dsq-cost itself, not the command that does not know them
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    return guarded(f"dsq-cost {arguments.command}", lambda: answer(arguments))


def answer(arguments: argparse.Namespace) -> None:
    """Print or write what one command finds. Raises ValueError for bad input, before anything is written."""
    ends = {"output": ("",), "picture": (".png", ".svg"), "html": (".html",)}
    for name, accepted in ends.items():
        if path := getattr(arguments, name, None):
            check_writable(path)
            if not path.endswith(accepted):
                raise ValueError(f"{name} {path} must end in {' or '.join(accepted)}")
    if arguments.output and arguments.output.endswith((*ends["picture"], *ends["html"])):
        raise ValueError(f"output {arguments.output} is for text: give --picture or --html")
    module = import_module(f"costmodel.cli.commands.{MODULES.get(arguments.command, 'step')}")
    report = getattr(module, arguments.command)(arguments)
    text = report.json() if arguments.json else report.csv() if arguments.csv else report.table()
    if arguments.output:
        write_text(arguments.output, text)
    else:
        sys.stdout.write(text)


def parser() -> OneLineParser:
    text = "What a training step costs: memory, time, DRAM traffic, arithmetic, roofline."
    top = OneLineParser(prog="dsq-cost", description=text, allow_abbrev=False)
    _examples(top, [f"{name} {examples[0]}" for name, examples in EXAMPLES.items()])
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    for add in (_plan, _estimate, _table, _roofline, _calibrate, _trace):
        add(commands)
    return top


def _plan(commands: Commands) -> None:
    summary = "does it fit, how fast is it, what bounds it, and what would help"
    command = _command(commands, "plan", summary)
    text = "the model, as --workload has it; and precisions, instead of the usual methods: " + PRECISION_HELP
    command.add_argument("words", nargs="*", metavar="MODEL|PRECISION", help=text)
    group = command.add_argument_group("devices and training")
    _int(group, "devices", 1, "data-parallel devices, each with its own batch (default: 1)", "--gpus")
    text = "what the devices share: 1 optimiser, 2 and gradients, 3 and parameters (ZeRO, FSDP; default: 0, nothing)"
    group.add_argument("--zero", type=int, choices=range(4), default=0, help=text)
    _int(group, "tensor", 1, "devices that share each layer (tensor and sequence parallel)")
    _int(group, "pipeline", 1, "devices in a pipeline of layers (1F1B)")
    _int(group, "accumulate", 1, "batches of a step on each device")
    _text(group, "fit", "SIZE", "memory of a device, e.g. 80GB or 24GiB (default: the hardware's)")
    _int(group, "qlora", None, "as --lora, over weights of 4 bits (NF4, with scales quantised too)")
    text = "adam (default), adam-8bit (bitsandbytes), adam-16bit (all in 16 bits), adam-8bit-16bit (8 bits over "
    text += "weights of 16), adafactor (factored), sgd"
    group.add_argument("--optimiser", "--optimizer", default="adam", metavar="NAME", help=text)
    _flag(group, "offload", "the optimiser's state, and master weights, lie in the host's memory")
    text = "the optimiser updates each layer's weights in the backward, as soon as their gradients are there"
    _flag(group, "in-backward", text)
    text = "time against memory of all methods, and the best one's memory over the step, as .png or .svg"
    _text(command, "picture", "FILE", text)
    _text(command, "html", "FILE", "the same as a page to explore, in one .html file")


def _estimate(commands: Commands) -> None:
    command = _command(commands, "estimate", "cost one or more precisions, or a run that rises from one to the next")
    command.add_argument("precision", nargs="+", help=PRECISION_HELP)
    text = "the precisions are the levels of a run, each but the first from such a fraction of it on: 0.8, or '0.2 0.8'"
    _text(command, "rise-at", "FRACTIONS", text)
    text = "what figures are relative to, e.g. float:[16,16,16,16] (default: fixed-point 32)"
    _text(command, "relative-to", "PRECISION", text, "fixed:[32,32,32,32]")
    text = "first-principles: tensors actually moved; paper: the calibrated model of tables 1 and 6"
    profiles = ("first-principles", "paper")
    command.add_argument("--profile", choices=profiles, default=profiles[0], help=text)


def _table(commands: Commands) -> None:
    command = _command(commands, "table", "the paper's tables 1, 6 and 7 beside ours, with residuals", workload=False)
    command.add_argument("table", nargs="*", type=int, metavar="number", help="1, 6, 7 (default: all)")
    _hardware(command, "for table 7")


def _roofline(commands: Commands) -> None:
    command = _command(commands, "roofline", "intensity, bound and time of each operation class, and the picture")
    command.add_argument("precision", nargs="+", help=PRECISION_HELP)
    _text(command, "picture", "FILE", "write the roofline as .png or .svg")


def _calibrate(commands: Commands) -> None:
    summary = "measure this machine, in under two minutes, as a hardware file for --hardware"
    command = _command(commands, "calibrate", summary, workload=False)
    command.add_argument("file", help="the .toml file to write")
    command.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")


def _trace(commands: Commands) -> None:
    summary = "run a model of transformers without data, once, and write its step as a workload file"
    command = _command(commands, "trace", summary, workload=False)
    command.add_argument("model", help="a config.json, or a folder that has one")
    command.add_argument("file", help="the .json file to write, for --workload")
    _int(command, "sequences", 1, "sequences a batch (default: 1)")
    _int(command, "tokens", 512, "tokens of a sequence (default: 512)")


def _command(commands: Commands, name: str, summary: str, workload: bool = True) -> OneLineParser:
    description = summary[0].upper() + summary[1:] + "."
    command = commands.add_parser(name, help=summary, description=description, allow_abbrev=False)
    _examples(command, [f"{name} {example}" for example in EXAMPLES[name]])
    command.set_defaults(parser=command)
    if workload:
        _workload(command)
        _format(command)
    out = command.add_argument_group("output")
    kinds = out.add_mutually_exclusive_group()
    _flag(kinds, "json", "JSON instead of a table")
    _flag(kinds, "csv", "CSV instead of a table (the first table)")
    out.add_argument("--output", "-o", metavar="FILE", help="write there instead of to the terminal")
    return command


def _examples(command: argparse.ArgumentParser, examples: list[str]) -> None:
    command.formatter_class = argparse.RawDescriptionHelpFormatter
    command.epilog = "\n".join(["examples:", *(f"  dsq-cost {example}".rstrip() for example in examples)])


def _int(group: Options, name: str, default: int | None, text: str, *aliases: str) -> None:
    group.add_argument(f"--{name}", *aliases, type=int, default=default, metavar="N", help=text)


def _text(group: Options, name: str, meant: str, text: str, default: str | None = None) -> None:
    group.add_argument(f"--{name}", metavar=meant, help=text, default=default)


def _flag(group: Options, name: str, text: str) -> None:
    group.add_argument(f"--{name}", action="store_true", help=text)


def _hardware(group: Options, purpose: str) -> None:
    _text(group, "hardware", "NAME|FILE", f"{purpose} (default: {DEFAULT_HARDWARE})", DEFAULT_HARDWARE)


def _workload(command: argparse.ArgumentParser) -> None:
    """The fields of workloads.named.AskedStep."""
    group = command.add_argument_group("workload and hardware")
    text = f"{', '.join(names())}; or a Hugging Face config.json, or a folder that has one; or a workload file of "
    text += f"dsq-cost trace or dsq.workload.trace (default: {DEFAULT_MODEL})"
    _text(group, "workload", "NAME|FILE", text, DEFAULT_MODEL)
    _int(group, "sequences", None, "sequences a batch (default: the workload's)", "--batch-size")
    _int(group, "tokens", None, "tokens a sequence (default: the workload's)")
    _int(group, "source-length", None, "encoder tokens a sequence, where both sides differ")
    _int(group, "target-length", None, "decoder tokens a sequence")
    _hardware(group, f"{', '.join(profile_names())}, or a .toml file")
    _int(group, "lora", None, "train adapters of this rank alone (LoRA), over frozen 16-bit weights")
    text = "layers that have adapters (default: all linear layers of all blocks)"
    _text(group, "lora-layers", "REGEX", text, ADAPTED)
    _text(group, "freeze", "REGEX", "layers whose parameters are not trained")
    text = "logits are made 1,024 tokens at a time, with their gradient (Liger-Kernel, torchtune)"
    _flag(group, "chunked-loss", text)
    attention = group.add_mutually_exclusive_group()
    text = "attention's scores stay on chip and are made again (default for models of transformers)"
    _flag(attention, "fused-attention", text)
    _flag(attention, "eager-attention", "attention's scores are stored (default for fairseq's models)")


def _format(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("format")
    text = f"of precisions that name none (default: {DEFAULT})"
    group.add_argument("--format", default=DEFAULT, choices=format_names(), help=text)
    for field, defaults in all_sizes().items():
        stated = ", ".join(f"{default} in {name}" for name, default in defaults.items())
        _int(group, field.replace("_", "-"), None, f"{field.replace('_', ' ')} (default: {stated})")
    _text(group, "exclude", "REGEX", "layers left unconverted, e.g. output_projection")
    text = "bits of what no quantiser touches (default: 16 where q0..q3 fit); 32: a model in float32 around the layers"
    group.add_argument("--container", type=int, choices=(16, 32), help=text)
