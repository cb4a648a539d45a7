"""What users get wrong, as fairseq, torch and Python put it, and the line that says what to do about it."""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from fairseq_plugin.flags import InputError

_DATA = "give a directory that dsq-preprocess wrote"
_DICTIONARY = "give a dictionary that dsq-preprocess wrote"
_PREFIX = "give --trainpref PREFIX and the like of texts PREFIX.LANGUAGE"

#: how an error begins, class and text -> the line for the user; {0}, {1}: the groups of the pattern
MISTAKES = {
    r"InputError: (.*)": "{0}",
    r"OSError: Model file not found: (.*)": "--path: {0} does not exist: give a checkpoint that dsq-train wrote",
    r"FloatingPointError": "the loss or its gradients are not finite: give a lower --lr, a --clip-norm, or more bits "
    "at q3; crash.pt in --save-dir is the state before it",
    r"\w+: The dataset is empty": "--max-tokens: no sentence of the training data fits: give more, or --batch-size",
    r"\w+: Could not infer language pair": f"data: there is no train.SOURCE-TARGET.SOURCE.idx in it: {_DATA}",
    r"AssertionError: Index file doesn't match": f"data: an .idx file in it is damaged: {_DATA}",
    r"ValueError: offset must be non-negative": f"data: a .bin file in it is cut short: {_DATA}",
    r"AssertionError: ((?:--sampling|--replace-unk) requires .*)": "{0}",
    r"AssertionError: min_len cannot be larger": "--min-len must not be above the longest output of --max-len-b",
    r"ValueError: DiverseBeamSearch requires": "--diverse-beam-groups must divide --beam",
    r"InterpolationKeyError: Interpolation key '(\w+)\.(\w+)'": "--task needs a --{0} that has {1}: give one",
    r"ValueError: malformed node": "an option that takes a Python value, as \"{{'lr': [1]}}\", has other text",
    r"ValueError: Incorrect dictionary format.*: (\".*)": f"--srcdict or --tgtdict: no word and count in {{0}}: "
    f"{_DICTIONARY}",
    r"RuntimeError: (Duplicate word found .*?)\.": f"--srcdict or --tgtdict: {{0}}: {_DICTIONARY}",
    r"ValueError: (--finetune-from-model[^:]*)": "{0}",
    r"Exception: AdaptiveLoss is not compatible": "--criterion adaptive_loss needs --ddp-backend legacy_ddp",
    r"ValueError: DistributedDataParallel device_ids": "--ddp-backend: on a CPU give legacy_ddp",
    r"\w+: (?:Distributed package doesn't have |ProcessGroup)NCCL": "--distributed-backend: on a CPU give gloo",
    r"ImportError: .*Please install (?:the )?fairscale": "--ddp-backend or --zero-sharding: this one needs fairscale: "
    "install it, or give another",
    r"AssertionError: world size is (\d+) but have (\d+)": "--distributed-world-size: {1} GPUs for {0} workers; "
    "on a CPU start them by torchrun",
    r"ValueError: Cannot combine --fp16": "--fp16 and --bf16 exclude each other: give one",
    r"\w+: .*Torch not compiled with CUDA enabled": "--fp16 needs a GPU; on a CPU --bf16 works, and "
    "--memory-efficient-fp16, and --fp16-no-flatten-grads",
    r"AttributeError: '(\w+)' object has no attribute 'forward_encoder'": "--task generates with other models than the "
    "{0} of --path: leave --task out",
    r"RuntimeError: Error\(s\) in loading state_dict[^\n]*\n\s*([^\n]*)": "--restore-file/--path: the checkpoint is of "
    "another architecture or vocabulary than --arch and the data: {0}; give its own --arch and data, or another "
    "--save-dir",
}


def explain(error: BaseException, command: str) -> str | None:
    """What to tell the user of ``error``, or of what it came of; None if it is no mistake of theirs."""
    return next(filter(None, (_explain_one(cause, command) for cause in _causes(error))), None)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """``error`` and what it came of, the first cause first; an InputError says by itself what it came of."""
    if error is not None:
        if not isinstance(error, InputError):
            yield from _causes(error.__cause__ or error.__context__)
        yield error


def _explain_one(error: BaseException, command: str) -> str | None:
    for pattern, line in MISTAKES.items():
        if found := re.match(pattern, f"{type(error).__name__}: {error}", re.DOTALL):
            return line.format(*found.groups())
    return _of_a_file(error, command) if isinstance(error, OSError) else None


def _of_a_file(error: OSError, command: str) -> str | None:
    if _is_of_output(error):
        return f"--save-dir or --destdir: {error.filename} cannot be written to: give another directory"
    if not isinstance(error, FileNotFoundError):
        return None
    if command == "preprocess":
        return f"{error.filename or error} does not exist: {_PREFIX}"
    missing = f"{error.filename} does not exist" if error.filename else str(error)
    return f"data: {missing}: {_DATA}"


def _is_of_output(error: OSError) -> bool:
    """Whether it is about --save-dir or --destdir. One that cannot be made, as in /proc, is "not found"."""
    if isinstance(error, (PermissionError, FileExistsError, NotADirectoryError)):
        return True
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--save-dir", "--destdir", dest="folder", type=Path)
    folder = parser.parse_known_args()[0].folder
    return bool(folder and error.filename) and Path(error.filename) in (folder, *folder.parents)
