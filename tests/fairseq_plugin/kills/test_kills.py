"""A run killed at any of its file operations goes on and ends with the bits of an unbroken one.

Run as a module, one process imports everything; each training is a fork of it.
"""

import contextlib
import ctypes
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fairseq_plugin import checkpoints
from tests.fairseq_plugin.harness import LEVELS, MODEL, run, start

ALL = 20
UPDATES = 6
SCHEDULE = ["--lr", 0.1, "--save-interval-updates", 2, "--max-update", UPDATES, "--dsq-levels", LEVELS]
SCHEDULE += ["--dsq-patience", 1, "--dsq-rounding", "stochastic"]


class Killer:
    """killer.c, which is loaded in this process."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.killer_seen.restype = ctypes.c_long

    def arm(self, folder: Path, operations: int = -1) -> None:
        """Count the file operations in ``folder``; the one of this number is the last."""
        self._library.killer_arm(str(folder).encode(), ctypes.c_long(operations))

    def seen(self) -> int:
        """Operations counted since."""
        return int(self._library.killer_seen())


def train(data: Path, folder: Path, before: Callable[[], None] = lambda: None) -> int:
    """The process of a training in ``folder``; ``before`` runs in it first."""
    process = os.fork()
    if process:
        return process
    with open(folder.with_suffix(".log"), "a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        status = 1
        with contextlib.suppress(BaseException):
            before()
            run("train", data, *MODEL, *SCHEDULE, "--save-dir", folder)
            status = 0
        sys.stdout.flush()
        os._exit(status)


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def same_end(one: Path, other: Path) -> bool:
    """Whether two runs ended with the same bits in the model, the optimizer and the record."""
    checkpoints = [torch.load(run / "checkpoint_last.pt", weights_only=True) for run in (one, other)]
    schedules = [checkpoint["model"].pop("dsq._extra_state") for checkpoint in checkpoints]
    states = [[file["model"], *file["last_optimizer_state"]["state"].values()] for file in checkpoints]
    tensors = [[torch.as_tensor(x) for part in state for x in part.values()] for state in states]
    equal = len(tensors[0]) == len(tensors[1]) and all(map(torch.equal, *tensors))
    records = [json.loads((run / "dsq_history.json").read_text()) for run in (one, other)]
    return equal and schedules[0] == schedules[1] and records[0] == records[1]


def _finished(folder: Path) -> bool:
    """Whether the last update is in the checkpoint: fairseq would make one more."""
    last = folder / "checkpoint_last.pt"
    return last.exists() and torch.load(last, weights_only=True)["optimizer_history"][-1]["num_updates"] == UPDATES


def survives(data: Path, whole: Path, folder: Path) -> str:
    """Say what went wrong with a killed training; "" if it goes on and ends as ``whole``."""
    damaged = [path.name for path in folder.glob("*.pt") if not checkpoints.is_whole(path)]
    if damaged:
        return f"damaged: {damaged}"
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    if not _finished(folder) and ended(train(data, folder)):
        return "did not go on"
    return "" if same_end(whole, folder) else "ended with other bits"


def main(data: Path, scratch: Path, first: int, kills: int) -> None:
    """Print JSON: what went wrong after a kill at each operation ("": nothing), and how many operations a run has.

    ``first``: of ALL parts of a run's operations, the first in which one is killed.
    """
    killer, draw = Killer(), random.Random(first)
    whole, counted = scratch / "whole", scratch / "operations"
    process = os.fork()
    if not process:
        killer.arm(whole)
        run("train", data, *MODEL, *SCHEDULE, "--save-dir", whole)
        counted.write_text(str(killer.seen()))
        os._exit(0)
    assert ended(process) == 0
    operations, outcomes = int(counted.read_text()), {}
    for part in range(first, first + kills):
        operation = 1 + part * operations // ALL + draw.randrange(max(1, operations // ALL))
        folder = scratch / f"operation-{operation}"
        status = ended(train(data, folder, functools.partial(killer.arm, folder, operation)))
        outcome = survives(data, whole, folder) if status == -signal.SIGKILL else f"ended with {status}"
        outcomes[operation] = outcome
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"outcomes": outcomes, "operations": operations}))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """killer.c, compiled."""
    if sys.platform != "linux" or not shutil.which("cc"):
        pytest.skip("killing at a file operation takes Linux and a C compiler")
    path = tmp_path / "killer.so"
    subprocess.run(["cc", "-O1", "-fPIC", "-shared", "-o", path, Path(__file__).with_name("killer.c")], check=True)
    return path


@pytest.mark.parametrize(
    ("first", "kills"), [(7, 1), *(pytest.param(first, 5, marks=pytest.mark.slow) for first in range(0, 20, 5))]
)
def test_killed_runs_end_as_an_unbroken_one(data: Path, tmp_path: Path, library: Path, first: int, kills: int) -> None:
    arguments = ["-m", __spec__.name, data, tmp_path, first, kills]
    process = start(*arguments, LD_PRELOAD=str(library))
    output = process.communicate()[0]
    assert process.returncode == 0, output
    outcome = json.loads(output.splitlines()[-1])
    assert list(outcome["outcomes"].values()) == [""] * kills, outcome
    assert outcome["operations"] > 50  # that so many were seen shows that they are counted


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
