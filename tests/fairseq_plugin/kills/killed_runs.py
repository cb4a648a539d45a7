"""Trainings killed at a moment or at a file operation, each then gone on with to its end. Started by test_kills.

One process imports everything; each training is a fork of it.
"""

import contextlib
import ctypes
import functools
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fairseq_plugin import checkpoints
from tests.fairseq_plugin.harness import LEVELS, MODEL, run

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
    first, second = (torch.load(it / "checkpoint_last.pt", weights_only=True) for it in (one, other))
    state = [it["model"].pop("dsq._extra_state") for it in (first, second)]
    tensors = [
        [
            *it["model"].values(),
            *(moment for each in it["last_optimizer_state"]["state"].values() for moment in each.values()),
        ]
        for it in (first, second)
    ]
    equal = len(tensors[0]) == len(tensors[1]) and all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*tensors, strict=True)
    )
    records = [json.loads((it / "dsq_history.json").read_text()) for it in (one, other)]
    return equal and state[0] == state[1] and records[0] == records[1]


def _finished(folder: Path) -> bool:
    """Whether the last update is in the checkpoint: fairseq would make one more."""
    last = folder / "checkpoint_last.pt"
    return last.exists() and torch.load(last, weights_only=True)["optimizer_history"][-1]["num_updates"] == UPDATES


def survives(data: Path, whole: Path, folder: Path, process: int) -> str:
    """What went wrong with the training that ``process`` was; "" where it was killed, goes on and ends as ``whole``."""
    status = ended(process)
    if status not in (-signal.SIGKILL, 0):  # 0: it ended before the moment came
        return f"ended with {status}"
    damaged = [path.name for path in folder.glob("*.pt") if not checkpoints.is_whole(path)]
    if damaged:
        return f"damaged: {damaged}"
    for path in folder.glob("*.json"):
        json.loads(path.read_text())
    if not _finished(folder) and ended(train(data, folder)):
        return "did not go on"
    return "" if same_end(whole, folder) else "ended with other bits"


def main(data: Path, scratch: Path, kills: int) -> None:
    """Print JSON: how many kills, the failures, the number of file operations of a run and its seconds."""
    killer, draw = Killer(), random.Random(0)
    whole, counted = scratch / "whole", scratch / "operations"
    start = time.monotonic()

    def count() -> None:
        killer.arm(whole)

    process = os.fork()
    if not process:
        count()
        run("train", data, *MODEL, *SCHEDULE, "--save-dir", whole)
        counted.write_text(str(killer.seen()))
        os._exit(0)
    assert ended(process) == 0
    seconds, operations = time.monotonic() - start, int(counted.read_text())
    failures = {}
    for number in range(kills):
        operation = 1 + (number * operations) // kills + draw.randrange(max(1, operations // kills))
        folder = scratch / f"operation-{operation}"
        process = train(data, folder, functools.partial(killer.arm, folder, operation))
        failures[folder.name] = survives(data, whole, folder, process)
        shutil.rmtree(folder, ignore_errors=True)
        moment = draw.uniform(0, seconds)
        folder = scratch / f"moment-{number}"
        process = train(data, folder)
        time.sleep(moment)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        failures[folder.name] = survives(data, whole, folder, process)
        shutil.rmtree(folder, ignore_errors=True)
    failed = {name: why for name, why in failures.items() if why}
    print(json.dumps({"kills": len(failures), "failed": failed, "operations": operations, "seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
