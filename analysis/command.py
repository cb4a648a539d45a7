"""What the commands of analysis/ share: a mistake of the user's ends in one line and exit status 2; --dsq-levels."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

#: the paper's schedule: from 2 bits up
LEVELS = "[2,2,2,16] [16,4,4,16]"


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage text before its error line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def guarded(prog: str, work: Callable[[], None]) -> int:
    """The exit status of work: 0, or 2 where it raised ValueError or OSError, whose text is then the one line."""
    try:
        work()
    except (ValueError, OSError) as error:
        print(f"{prog}: error: {error}", file=sys.stderr)
        return 2
    return 0


def add_levels(parser: argparse.ArgumentParser) -> None:
    """--dsq-levels, as ``levels``."""
    parser.add_argument(
        "--dsq-levels", dest="levels", default=LEVELS, help='precision schedule, or "none" (default: %(default)s)'
    )
