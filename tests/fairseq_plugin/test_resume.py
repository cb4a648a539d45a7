"""A run killed by SIGKILL and resumed from its last checkpoint ends as an unbroken one: the same bits."""

import json
import signal
import time
from pathlib import Path

import torch

from tests.fairseq_plugin.harness import LEVELS, MODEL, run, start

UPDATES = 44
#: a learning rate too high to get far, so that the level rises; random numbers in dropout and in the rounding
SCHEDULE = ["--lr", 0.1, "--save-interval-updates", 4, "--max-update", UPDATES, "--dsq-levels", LEVELS]
SCHEDULE += ["--dsq-patience", 2, "--dsq-rounding", "stochastic"]


def kill_after(checkpoint: Path, data: Path) -> None:
    """Train on in a process of its own until ``checkpoint`` is there, then kill that."""
    process = start("-m", "fairseq_plugin.commands", "train", data, *MODEL, *SCHEDULE, "--save-dir", checkpoint.parent)
    deadline = time.monotonic() + 180
    while not checkpoint.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def final_state(folder: Path) -> dict:
    return torch.load(folder / "checkpoint_last.pt", weights_only=True)


def test_killed_and_resumed_equals_unbroken(data: Path, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run("train", data, *MODEL, *SCHEDULE, "--save-dir", whole)
    for checkpoint in ("checkpoint_1_8.pt", "checkpoint_3_24.pt"):  # the level rises between them
        kill_after(broken / checkpoint, data)
    assert final_state(broken)["optimizer_history"][-1]["num_updates"] < UPDATES
    run("train", data, *MODEL, *SCHEDULE, "--save-dir", broken)

    expected, resumed = final_state(whole), final_state(broken)
    assert resumed["optimizer_history"][-1]["num_updates"] == UPDATES
    state = expected["model"].pop("dsq._extra_state")
    assert resumed["model"].pop("dsq._extra_state") == state
    assert [work[0] > 0 for work in state["scheduler"]["work"]] == [True, True]  # both levels were trained at
    assert expected["model"].keys() == resumed["model"].keys()
    for name, tensor in expected["model"].items():
        assert torch.equal(tensor, resumed["model"][name]), name
    moments, again = (it["last_optimizer_state"]["state"] for it in (expected, resumed))
    for index, moment in moments.items():
        assert torch.equal(moment["exp_avg_sq"], again[index]["exp_avg_sq"])

    history, record = (json.loads((folder / "dsq_history.json").read_text()) for folder in (whole, broken))
    assert record == history
