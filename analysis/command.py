"""What the commands of analysis/ share: a mistake of the user's ends in one line and exit status 2."""

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn


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
