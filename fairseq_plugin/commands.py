"""fairseq's own commands with the --dsq-* flags: dsq-preprocess, dsq-train, dsq-generate and the others of COMMANDS.

``python -m fairseq_plugin.commands train`` does the same. A mistake with DSQ, a checkpoint or a file ends in one line
and exit status 2; every other error ends as in fairseq.
"""

import argparse
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

from dsq.command import fail

INSTALL = (
    'fairseq is not installed here: pip install "dsq-torch[fairseq]" && pip install --no-deps fairseq==0.12.2 '
    "(fairseq's metadata names a version that pip no longer takes, hence --no-deps)"
)
#: command -> the module with its cli_main()
COMMANDS = {
    "preprocess": "fairseq_cli.preprocess",
    "train": "fairseq_cli.train",
    "hydra-train": "fairseq_cli.hydra_train",  # --dsq-x is task.dsq_x=... there
    "generate": "fairseq_cli.generate",  # a checkpoint trained with DSQ generates at the level it was trained at
    "interactive": "fairseq_cli.interactive",
    "eval-lm": "fairseq_cli.eval_lm",
    "average": "fairseq_plugin.averaging",
}
_WITHOUT_USER_DIR = ("hydra-train", "average")
INTERRUPTED = 130  #: a shell's exit status of a command that Ctrl-C stopped
#: pattern of an error's class and text -> the line for the user; {0}: the group of the pattern
_MISTAKES = {
    r"InputError: (.*)": "{0}",
    r"FloatingPointError": "the loss or its gradients are not finite: give a lower --lr, a --clip-norm, or more bits "
    "at q3; crash.pt in --save-dir is the state before it",
    r"RuntimeError: Error\(s\) in loading state_dict[^\n]*\n\s*([^\n]*)": "--restore-file/--path: the checkpoint is of "
    "another architecture or vocabulary than --arch and the data: {0}; give its own --arch and data, or another "
    "--save-dir",
    r"RuntimeError: \Z": "--arch must be given, as in --arch transformer_iwslt_de_en",  # fairseq's own says nothing
    r"AssertionError: Torch not compiled with CUDA|RuntimeError: Found no NVIDIA driver": "there is no GPU, which "
    "plain --fp16 and --quant-noise-scalar need: give --cpu, with --bf16 or with --fp16 --fp16-no-flatten-grads",
    r"(?:OSError|FileNotFoundError|PermissionError|FileExistsError|NotADirectoryError): (.*)": "{0}",
}


def explain(error: BaseException) -> str | None:
    """Return a line for the user on ``error`` or its cause; None if neither is among the known mistakes."""
    for cause in _causes(error):
        for pattern, line in _MISTAKES.items():
            if match := re.match(pattern, f"{type(cause).__name__}: {cause}", re.DOTALL):
                return line.format(*match.groups())
    return None


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the causes of ``error``, the first one first, and ``error``; an InputError names its cause in its text."""
    if error is not None:
        if type(error).__name__ != "InputError":
            yield from _causes(error.__cause__ or error.__context__)
        yield error


def _run(command: str) -> None:
    prog = f"dsq-{command}"
    if not hasattr(importlib.import_module("fairseq_plugin"), "shims"):
        fail(prog, INSTALL)
    sys.argv[0] = prog
    if command not in _WITHOUT_USER_DIR and not any(word.startswith("--user-dir") for word in sys.argv):
        sys.argv[1:1] = ["--user-dir", str(Path(__file__).parent)]
    # fairseq's usage text is 300 lines
    argparse.ArgumentParser.error = lambda parser, message: fail(parser.prog, message)  # type: ignore
    try:
        importlib.import_module(COMMANDS[command]).cli_main()
    except KeyboardInterrupt:
        print(f"{prog}: stopped; a training goes on from its last checkpoint by the same command", file=sys.stderr)
        raise SystemExit(INTERRUPTED) from None
    except Exception as error:
        message = explain(error)
        if message is None:
            raise
        fail(prog, message)


#: the commands of pyproject.toml
preprocess, train, hydra_train, generate, interactive, eval_lm, average = (
    functools.partial(_run, command) for command in COMMANDS
)

if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        print(f"usage: python -m fairseq_plugin.commands {{{','.join(COMMANDS)}}} ...", file=sys.stderr)
        raise SystemExit(2)
    _run(sys.argv.pop(1))
