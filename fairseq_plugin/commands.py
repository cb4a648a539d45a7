"""fairseq's own commands on this Python, with the --dsq-* flags: dsq-preprocess, dsq-train, dsq-generate and the rest.

Also ``python -m fairseq_plugin.commands train`` and so on. What a user got wrong ends in one line and exit status 2;
what went wrong inside, in a traceback.
"""

import argparse
import functools
import importlib
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn
from unittest import mock

from dsq.command.parser import fail
from dsq.process_memory import give_memory_back

INSTALL = (
    'fairseq is not installed here: pip install "dsq-torch[fairseq]" && pip install --no-deps fairseq==0.12.2 '
    "(fairseq's metadata names a version that pip no longer takes, hence --no-deps)"
)
#: command -> the module that has its cli_main()
COMMANDS = {
    "preprocess": "fairseq_cli.preprocess",
    "train": "fairseq_cli.train",
    "hydra-train": "fairseq_cli.hydra_train",  # --dsq-x is task.dsq_x=... there
    "generate": "fairseq_cli.generate",  # a checkpoint trained with DSQ generates at the level it was trained at
    "average": "fairseq_plugin.averaging",
}
_WITH_USER_DIR = ("preprocess", "train", "generate")
INTERRUPTED = 130  #: the exit status of a command that Ctrl-C stopped, as a shell has it


def check_training(arguments: list[str]) -> None:
    """Raise ValueError, in dsq-train's own words, where it would not read ``arguments``; nothing runs or is written."""
    if not _installed():
        raise ValueError(INSTALL)
    options = importlib.import_module("fairseq.options")
    from fairseq_plugin.flags import check

    with mock.patch.object(argparse.ArgumentParser, "error", _raise):
        check(options.parse_args_and_arch(options.get_training_parser(), arguments))


def _raise(_: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ValueError(message)


def _installed() -> bool:
    import fairseq_plugin

    return hasattr(fairseq_plugin, "shims")


def _run(command: str) -> None:
    prog = f"dsq-{command}"
    if not _installed():
        fail(prog, INSTALL)
    if re.search(r"dsq[-_]stash[= ]all\b", " ".join(sys.argv)):  # before fairseq makes a tensor
        give_memory_back()
    from fairseq_plugin import checkpoints
    from fairseq_plugin.mistakes.explained import explain

    sys.argv[0] = prog
    argparse.ArgumentParser.error = _error  # type: ignore[assignment,method-assign]  # fairseq's usage text is 300 lines
    try:
        _fairseq_main(command)()
    except KeyboardInterrupt:
        print(f"{prog}: stopped; a training goes on from its last checkpoint by the same command", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        message = explain(error, command)
        if message is None:
            raise
        fail(prog, message)
    finally:
        checkpoints.release()


def _error(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """One line; fairseq reads numbers by functions without a name."""
    fail(parser.prog, message.replace("invalid <lambda> value:", "must be a number, or some as in 1,2, got"))


def _fairseq_main(command: str) -> Callable[[], None]:
    import fairseq_plugin

    if command in _WITH_USER_DIR:
        here = Path(fairseq_plugin.__file__).parent
        parser = argparse.ArgumentParser(f"dsq-{command}", add_help=False, allow_abbrev=False)
        parser.add_argument("--user-dir", type=Path)
        given = parser.parse_known_args()[0].user_dir
        if given is None:
            sys.argv[1:1] = ["--user-dir", str(here)]
        elif not given.is_dir():
            fail(f"dsq-{command}", f"--user-dir: there is no directory {given}")
    main: Callable[[], None] = importlib.import_module(COMMANDS[command]).cli_main
    return main


#: the commands of pyproject.toml
preprocess = functools.partial(_run, "preprocess")
train = functools.partial(_run, "train")
hydra_train = functools.partial(_run, "hydra-train")
generate = functools.partial(_run, "generate")
average = functools.partial(_run, "average")

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python -m fairseq_plugin.commands {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        raise SystemExit(2)
    _run(sys.argv.pop(1))
