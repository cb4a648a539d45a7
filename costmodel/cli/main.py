"""dsq-cost: what training costs, in memory, time and traffic. This file parses what commands.toml describes; commands/
answers.

Nothing here needs numpy, for --help to be quick.
"""

import argparse
import difflib
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from dsq import __version__
from dsq.command import OneLineParser, check_writable, guarded, printable, read_toml, write_text
from dsq.costmodel.hardware.hardware import DEFAULT_HARDWARE, profile_names
from dsq.costmodel.model.methods import format_names
from dsq.costmodel.names import refuse
from dsq.costmodel.workloads.named import ADAPTED, DEFAULT_MODEL, names
from dsq.formats import DEFAULT

_DESCRIBED = read_toml(Path(__file__).with_name("commands.toml"))
COMMANDS: dict[str, dict[str, Any]] = _DESCRIBED["commands"]
#: what stands in braces in commands.toml
_WORDS = {
    "precision": _DESCRIBED["precision"],
    "adapted": ADAPTED,
    "format": DEFAULT,
    "model": DEFAULT_MODEL,
    "models": ", ".join(names()),
    "hardware": DEFAULT_HARDWARE,
    "profiles": ", ".join(profile_names()),
}
Options = Mapping[str, Mapping[str, Any]]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Return 0, or 2 after one line on stderr for bad input."""
    arguments, unknown = parser().parse_known_args(argv)
    if hasattr(arguments, "words") and not any(word.startswith("-") for word in unknown):
        arguments.words += unknown  # argparse takes words in one place alone
        unknown = []
    if unknown:  # argparse would blame dsq-cost itself, not the command that does not know them
        arguments.parser.error(f"unrecognized arguments: {' '.join(unknown)}{_meant(unknown[0], arguments.parser)}")
    return guarded(f"dsq-cost {arguments.command}", lambda: answer(arguments))


def _meant(word: str, command: argparse.ArgumentParser) -> str:
    """Return the option that an unknown one stands for: that of other programs' spelling, or the one that looks like
    it."""
    options = command._option_string_actions
    spelling = word.partition("=")[0].replace("_", "-")
    for option, spellings in _DESCRIBED["spellings"].items():
        if spelling in spellings and (option.split()[0] in options or not option.startswith("--")):
            return f"; here it is {option}"
    near = difflib.get_close_matches(spelling, options, n=1, cutoff=0.72)
    return "".join(f"; nearest is {option}" for option in near)


def answer(arguments: argparse.Namespace) -> None:
    """Print or write what one command finds. Raises ValueError for bad input, before anything is written."""
    ends = {"output": ("",), "picture": (".png", ".svg"), "html": (".html",)}
    for name, accepted in ends.items():
        if path := getattr(arguments, name, None):
            check_writable(path)
            refuse((not path.endswith(accepted), f"{name} {path} must end in {' or '.join(accepted)}"))
    is_drawn = str(arguments.output).endswith((*ends["picture"], *ends["html"]))
    refuse((is_drawn, f"output {arguments.output} is for text: give --picture or --html"))
    module = import_module(f"dsq.costmodel.cli.commands.{COMMANDS[arguments.command]['module']}")
    report = getattr(module, arguments.command)(arguments)
    text = report.json() if arguments.json else report.csv() if arguments.csv else report.table()
    if arguments.output:
        write_text(arguments.output, text)
    else:
        sys.stdout.write(printable(text))


def parser() -> OneLineParser:
    top = OneLineParser(
        prog="dsq-cost",
        description="What a training step costs: memory, time, DRAM traffic, arithmetic, roofline.",
        epilog=_examples([f"{name} {described['examples'][0]}" for name, described in COMMANDS.items()]),
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="command")
    groups = _DESCRIBED["groups"]
    groups["format"]["--format"]["choices"] = format_names()
    for name, described in COMMANDS.items():
        summary: str = described["summary"]
        command = commands.add_parser(
            name,
            help=summary,
            description=summary[0].upper() + summary[1:] + ".",
            epilog=_examples([f"{name} {example}" for example in described["examples"]]),
            allow_abbrev=False,
        )
        command.set_defaults(parser=command)
        for title in described["groups"]:
            _add_options(command.add_argument_group(title), groups[title])
        _add_options(command, described["arguments"])
    return top


def whole(text: str) -> int:
    """Read a whole number, as argparse's type: 2048, 2e3. Raises ValueError."""
    return int(float(text)) if re.fullmatch(r"\d+e\d", text) else int(text)


whole.__name__ = "int"  # which argparse's errors name


def amount(text: str, units: Mapping[str, float], example: str) -> float:
    """Read a number with its unit, as argparse's type: 80GB, 1.5e9. Raises ArgumentTypeError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\d{1,2})?) ?([a-z]*)", text.lower())
    if not match or match[2] not in units or not float(match[1]):
        unit = " with its unit" if "" not in units else ""
        raise argparse.ArgumentTypeError(f"must be a number above 0{unit}, as in {example}, got {text!r}")
    return float(match[1]) * units[match[2]]


BYTES = {"b": 1, "kb": 1e3, "kib": 2**10, "mb": 1e6, "gb": 1e9, "tb": 1e12, "mib": 2**20, "gib": 2**30, "tib": 2**40}
COUNTS = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
#: the metavar of an option -> what reads it
_TYPES: dict[str, Callable[[str], float]] = {
    **dict.fromkeys(("N", "number"), whole),
    "SIZE": partial(amount, units=BYTES, example="80GB or 24MiB"),
    "COUNT": partial(amount, units=COUNTS, example="300M or 10B"),
    "PRICE": partial(amount, units={"": 1}, example="2.5"),
}


def _examples(examples: Sequence[str]) -> str:
    return "\n".join(["examples:", *(f"  dsq-cost {example}".rstrip() for example in examples)])


def _add_options(group: argparse._ActionsContainer, options: Options) -> None:
    """Add the options as commands.toml describes them."""
    exclusive = defaultdict(group.add_mutually_exclusive_group, {"": group})
    for words, described in options.items():
        how: Any = {name: text.format(**_WORDS) if isinstance(text, str) else text for name, text in described.items()}
        instead = how.pop("instead", "")
        if how.get("metavar") in _TYPES or isinstance(how.get("choices", [""])[0], int):
            how["type"] = _TYPES.get(how.get("metavar"), whole)
        elif words.startswith("--") and not how.keys() & {"metavar", "choices"}:
            how["action"] = "store_true"
        exclusive[instead].add_argument(*words.split(), **how)
