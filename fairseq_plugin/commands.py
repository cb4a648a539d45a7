"""dsq-preprocess, dsq-train and dsq-generate: fairseq's own commands on this Python, with the --dsq-* flags.

Also ``python -m fairseq_plugin.commands preprocess|train|generate``. What a user got wrong ends in one line and exit
status 2; what went wrong inside, in a traceback.
"""

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn
from unittest import mock

from dsq.command.parser import OneLineParser

INSTALL = (
    'fairseq is not installed here: pip install "dsq-torch[fairseq]" && pip install --no-deps fairseq==0.12.2 '
    "(fairseq's metadata names a version that pip no longer takes, hence --no-deps)"
)
COMMANDS = ("preprocess", "train", "generate")


def preprocess() -> None:
    """fairseq-preprocess: parallel text to binary data."""
    _run("preprocess")


def train() -> None:
    """fairseq-train, with the flags --dsq-*."""
    _run("train")


def generate() -> None:
    """fairseq-generate; a checkpoint trained with DSQ generates at the level it was trained at."""
    _run("generate")


def check_training(arguments: list[str]) -> None:
    """Raise ValueError, in dsq-train's own words, where it would not read ``arguments``; nothing runs or is written."""
    if not _installed():
        raise ValueError(INSTALL)
    options = importlib.import_module("fairseq.options")
    from fairseq_plugin.flags import config_of

    with mock.patch.object(argparse.ArgumentParser, "error", _raise):
        config_of(options.parse_args_and_arch(options.get_training_parser(), arguments))


def _raise(_: argparse.ArgumentParser, message: str) -> NoReturn:
    raise ValueError(message)


def _installed() -> bool:
    import fairseq_plugin

    return hasattr(fairseq_plugin, "shims")


def _run(command: str) -> None:
    prog = f"dsq-{command}"
    sys.argv[0] = prog
    argparse.ArgumentParser.error = OneLineParser.error  # type: ignore[assignment,method-assign]  # fairseq's usage text is 300 lines
    try:
        _fairseq_main(command)()
    except Exception as error:
        message = next(filter(None, (_explain(cause, command) for cause in _causes(error))), None)
        if message is None:
            raise
        print(f"{prog}: error: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def _fairseq_main(command: str) -> Callable[[], None]:
    import fairseq_plugin

    if not _installed():
        print(f"dsq-{command}: error: {INSTALL}", file=sys.stderr)
        raise SystemExit(2)
    if not any(argument.split("=")[0] == "--user-dir" for argument in sys.argv[1:]):
        sys.argv[1:1] = ["--user-dir", str(Path(fairseq_plugin.__file__).parent)]
    return importlib.import_module(f"fairseq_cli.{command}").cli_main


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it came of, the first cause first."""
    if error is not None:
        yield from _causes(error.__cause__ or error.__context__)
        yield error


def _explain(error: BaseException, command: str) -> str | None:
    """What to tell the user of ``error``; None if it is no mistake of theirs."""
    from fairseq_plugin.flags import InputError

    text = str(error)
    if isinstance(error, InputError):
        return text
    if isinstance(error, OSError) and _is_of_output(error):
        return f"--save-dir or --destdir: {error.filename} cannot be written to: give another directory"
    if isinstance(error, FileNotFoundError) and command == "preprocess":
        return f"{error.filename or text} does not exist: give --trainpref PREFIX and the like of texts PREFIX.LANGUAGE"
    if isinstance(error, FileNotFoundError):
        missing = f"{error.filename} does not exist" if error.filename else text
        return f"data: {missing}: give a directory that dsq-preprocess wrote"
    if text.startswith("Model file not found: "):
        return f"--path: {text.partition(': ')[2]} does not exist: give a checkpoint that dsq-train wrote"
    if "Torch not compiled with CUDA enabled" in text:
        return "--fp16 needs a GPU; on a CPU --bf16 works, and --memory-efficient-fp16, and --fp16-no-flatten-grads"
    if "Error(s) in loading state_dict" in text:
        return (
            "--restore-file/--path: the checkpoint is of another architecture or vocabulary than --arch and the data: "
            + text.splitlines()[1].strip()
            + "; give its own --arch and data, or another --save-dir"
        )
    return None


def _is_of_output(error: OSError) -> bool:
    """Whether --save-dir or --destdir cannot be written to; one that cannot be made, as in /proc, "does not exist"."""
    if isinstance(error, (PermissionError, FileExistsError, NotADirectoryError)):
        return True
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save-dir", "--destdir", dest="folder", type=Path)
    folder = parser.parse_known_args()[0].folder
    return bool(folder and error.filename) and Path(error.filename) in (folder, *folder.parents)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python -m fairseq_plugin.commands {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        raise SystemExit(2)
    _run(sys.argv.pop(1))
