"""A user's mistake ends in one line on stderr and exit status 2, with neither usage text nor traceback."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn


def fail(prog: str, message: object) -> NoReturn:
    """Print ``prog: error: message`` as one line on stderr and leave with status 2."""
    print(_line(prog, message), file=sys.stderr)
    raise SystemExit(2)


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage text before its error line, and descriptions as they are written. Subcommands made by
    it are of this class too.
    """

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        fail(self.prog, message)


def count(text: str) -> int:
    """argparse's type of how many there are of something: a whole number from 1."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"accepted are whole numbers from 1, got {text!r}")


def guarded(prog: str, work: Callable[[], object]) -> int:
    """The exit status of ``work``: 0, or 2 where it raised ValueError or OSError, whose text is then the one line, or
    lacked a package; 130 after Ctrl-C.

    Where the reader of standard output has gone (``| head``), or never was (``>&-``), there is nothing left to say: 0.
    """
    if sys.stdout is None:  # closed before Python started
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's own flush at exit succeeds
    except KeyboardInterrupt:
        print(_line(prog, "interrupted"), file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(_line(prog, error), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        print(_line(prog, f"{package} is not installed: pip install 'dsq-torch[plots]'"), file=sys.stderr)
        return 2
    return 0


def _line(prog: str, message: object) -> str:
    text = " ".join(str(message).splitlines())
    if len(text) > 1000:  # an argument or a field of a file may be as long as it likes
        text = f"{text[:700]} ... {text[-200:]}"
    return f"{prog}: error: {text}"
