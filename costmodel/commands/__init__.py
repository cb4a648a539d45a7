"""The subcommands: each turns parsed arguments into a Report."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable

from costmodel.commands import estimate, explain, roofline, sweep, table
from costmodel.output import Report, check_writable, write_whole

COMMANDS: dict[str, Callable[[argparse.Namespace], Report]] = {
    "estimate": estimate.run,
    "table": table.run,
    "roofline": roofline.run,
    "sweep": sweep.run,
    "explain": explain.run,
}


def run(arguments: argparse.Namespace) -> None:
    """Answer one command. Raises ValueError for bad input, before anything is written."""
    picture = getattr(arguments, "picture", None)
    for path in (arguments.output, picture):
        if path:
            check_writable(path)
    if picture and not picture.endswith((".png", ".svg")):
        raise ValueError(f"picture {picture} must end in .png or .svg")
    report = COMMANDS[arguments.command](arguments)
    text = report.json() if arguments.json else report.csv() if arguments.csv else report.table()
    if arguments.output:
        write_whole(arguments.output, lambda path: _write(path, text))
    else:
        sys.stdout.write(text)
        sys.stdout.flush()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
