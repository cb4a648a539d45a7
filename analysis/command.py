"""What the commands of analysis/ share: a mistake of the user's ends in one line and exit status 2; --dsq-levels."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
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


def refuse_used(out: Path, otherwise: str = "") -> None:
    """Raise ValueError where --out is there and more than an empty folder."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: there already; give a new or empty directory{otherwise}")


def make_folder(out: Path) -> None:
    """Make the folder --out, before the work whose results go there. Raises ValueError where none can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}; give a directory that can be written to") from None


def add_levels(parser: argparse.ArgumentParser) -> None:
    """--dsq-levels, as ``levels``."""
    parser.add_argument(
        "--dsq-levels", dest="levels", default=LEVELS, help='precision schedule, or "none" (default: %(default)s)'
    )
