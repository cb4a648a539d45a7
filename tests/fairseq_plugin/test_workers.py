"""Two workers on a CPU (gloo, legacy_ddp) go on from a checkpoint and step the schedule together."""

import json
import socket
from pathlib import Path

from tests.fairseq_plugin.harness import LEVELS, MODEL, run, start

#: dsq-train that says what loss the schedule was given, and the level after it
WORKER = """
from fairseq_plugin import commands, tasks

def step_schedule(state, model, update, loss):
    step(state, model, update, loss)
    print("STEP", update, loss, state.scheduler.level)

step, tasks.step_schedule = tasks.step_schedule, step_schedule
commands.train()
"""


def test_two_workers(data: Path, tmp_path: Path) -> None:
    given = [data, *MODEL, "--lr", 0, "--save-interval-updates", 1, "--dsq-patience", 1, "--dsq-levels", LEVELS]
    given += ["--save-dir", tmp_path]
    run("train", *given, "--max-update", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    given += ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--max-update", 4]
    workers = [start("-c", WORKER, *given, RANK=str(rank), **meeting) for rank in range(2)]
    logs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(logs)

    first, second = ([line for line in log.splitlines() if line.startswith("STEP")] for log in logs)
    assert first == second
    assert len(first) == 3
    assert first[-1].endswith(" 1")  # the loss got no better: the level rose, on both
    record = json.loads((tmp_path / "dsq_history.json").read_text())
    assert record["level"] == 1
    assert record["updates"] == 4
    assert record["levels"][1]["updates"] >= 1
    counts = [float(line.split("wpb=")[1].split(",")[0]) for line in logs[0].splitlines() if "| train_inner |" in line]
    alone = record["tokens"] - sum(counts)  # the update before; the others count the tokens of both workers
    assert len(counts) == 3
    assert 0 < alone < min(counts)
