"""Two workers on a CPU (gloo, legacy_ddp) step the schedule together."""

import json
import socket
from pathlib import Path

from tests.fairseq_plugin.harness import LEVELS, MODEL, start


def test_two_workers(data: Path, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    given = ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--save-dir", tmp_path]
    given += ["--lr", 0, "--dsq-patience", 1, "--save-interval-updates", 1, "--max-update", 3, "--dsq-levels", LEVELS]
    workers = [
        start("train", data, *MODEL, *given, MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", RANK=str(rank))
        for rank in range(2)
    ]
    logs = [worker.communicate(timeout=120)[0] for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(logs)
    record = json.loads((tmp_path / "dsq_history.json").read_text())
    # had one worker stayed at the first level, fairseq would have found gradients that disagree
    assert [level["updates"] for level in record["levels"]] == [2, 1]
    first = [line for line in logs[0].splitlines() if "| train_inner |" in line]
    words = [float(line.split("wpb=")[1].split(",")[0]) for line in first]
    assert record["tokens"] == sum(words)  # of both workers
