"""One DSQ run, in this process: what passes through the quantized op, what the record and the log say."""

import json
import logging
import math
import re
import socket
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import dsq
from fairseq_plugin.state import total_updates
from tests.fairseq_plugin.harness import (
    LEVELS,
    MODEL,
    contents,
    levels,
    resume,
    run,
    start,
    updates,
)

LINEARS = 2 * 6 + 2 * 10  # an encoder layer has 4 + 2, a decoder layer 4 + 4 + 2; the output projection is tied


def weights_called(calls) -> dict[str, int]:
    """How many different weights were used at each precision."""
    weights = {(layer.weight.data_ptr(), str(layer.quantizers.precision)) for layer in calls}
    return Counter(precision for _, precision in weights)


@pytest.mark.parametrize(("checkpoint", "precision"), [("1_2", "[2,2,2,16]"), ("1_3", "[16,4,4,16]")])
def test_generation_runs_at_the_level_trained_at(data, trained, calls, checkpoint, precision) -> None:
    # the checkpoint of update 2 was saved when the level had risen, but not one update was made at the new level
    run("generate", data, "--path", trained / f"checkpoint_{checkpoint}.pt", "--beam", 2, "--max-len-b", 5,
        "--num-workers", 0)  # fmt: skip
    assert weights_called(calls) == {precision: LINEARS}


def test_exclude_and_fixed_point_reach_the_model(data: Path, tmp_path: Path, calls) -> None:
    run("train", data, *MODEL, "--max-update", 1, "--disable-validation", "--save-dir", tmp_path, "--no-save",
        "--dsq-levels", "[8,8,8,16]", "--dsq-format", "fixed", "--dsq-fraction-bits", 4,
        "--dsq-exclude", r"output_projection|decoder\.", "--dsq-rounding", "stochastic")  # fmt: skip
    fmt = dsq.FixedPoint(8, 4)
    expected = dsq.Quantizers(fmt, fmt, fmt, dsq.FixedPoint(16, 4), "stochastic")
    assert {(call.quantizers, call.weight.shape[0]) for call in calls} == {(expected, 32), (expected, 64)}


def test_log_shows_the_cost_to_expect_the_level_and_its_change(trained: Path) -> None:
    lines = (trained / "log").read_text().splitlines()
    changes = [line for line in lines if line.startswith("DSQ level 0")]
    assert changes == [
        "DSQ level 0 [2,2,2,16] -> 1 [16,4,4,16] at update 2: no better validation loss in 1 validations"
    ]
    assert [line.split("dsq_level=")[1][0] for line in lines if "dsq_level=" in line] == ["0", "0", "1"]
    assert f"DSQ simulation: {LINEARS} linears converted, levels {LEVELS}" in lines
    (cost,) = [line for line in lines if line.startswith("DSQ cost to expect")]
    assert "arithmetic 0.0148 at [2,2,2,16], 0.0983 at [16,4,4,16], 0.0148 to 0.0983 in all; DRAM 0." in cost


def test_a_criterion_that_gives_the_model_more_than_the_batch_has(data: Path, tmp_path: Path) -> None:
    model = ["--arch", "nonautoregressive_transformer", "--task", "translation_lev", "--criterion", "nat_loss"]
    flags = [*MODEL, *model, "--noise", "full_mask", "--max-update", 1, "--disable-validation", "--no-save"]
    run("train", data, *flags, "--save-dir", tmp_path, "--dsq-levels", LEVELS)
    assert json.loads((tmp_path / "dsq_workload.json").read_text())["name"] == "NATransformerModel"


def test_history(trained: Path) -> None:
    record = json.loads((trained / "dsq_history.json").read_text())
    assert record["format"] == "snvint"
    assert record["block_size"] == 16
    assert record["level"] == 1
    assert [(level["precision"], level["updates"]) for level in record["levels"]] == [
        ([2, 2, 2, 16], 2),
        ([16, 4, 4, 16], 1),
    ]
    assert sum(level["tokens"] for level in record["levels"]) == record["tokens"]
    # two valid subsets, but one entry a validation
    assert [(one["update"], one["level"]) for one in record["validations"]] == [(1, 0), (2, 0), (3, 1)]
    assert record["validations"][0]["loss"] == record["validations"][1]["loss"]


def test_the_stash_stands_in_the_log(data: Path, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    flags = ["--log-format", "json", "--max-update", 2, "--disable-validation", "--no-save", "--save-dir", tmp_path]
    run("train", data, *MODEL, *flags, "--dsq-levels", "[8,4,4,8]", "--dsq-stash", "all")
    (line,) = [json.loads(line) for line in caplog.messages if "train_dsq_stash_mib" in line]
    assert 0.2 < float(line["train_dsq_stash_mib"]) < 0.3


def test_layers_that_run_again_and_a_running_mean_of_the_weights(data: Path, tmp_path: Path) -> None:
    flags = ["--checkpoint-activations", "--update-freq", 2, "--store-ema", "--ema-fp32", "--save-dir", tmp_path]
    for most in (2, 3):
        schedule = "[4,4,4,4] [-,4,-,-]" if most == 2 else "[4,4,4,4]  [-, 4, -, -]"  # widths, then formats
        run("train", data, *MODEL, *flags, "--dsq-levels", schedule, "--dsq-rise-at", 1, "--max-update", most)
    assert [(level["precision"], level["updates"]) for level in levels(tmp_path)] == [([4] * 4, 1), ("[-,4,-,-]", 2)]
    saved = torch.load(tmp_path / "checkpoint_last.pt", weights_only=True)
    assert saved["model"].keys() - saved["extra_state"]["ema"].keys() == {"dsq._extra_state"}
    assert saved["model"]["dsq._extra_state"]["scheduler"]["work"][1][0] == 2


def test_the_level_rises_at_a_fraction_of_a_run_that_epochs_bound(data: Path, tmp_path: Path, caplog) -> None:
    caplog.set_level(logging.INFO)
    flags = [*MODEL, "--max-tokens", 400, "--update-freq", 2, "--max-epoch", 3, "--save-interval-updates", 2,
             "--disable-validation", "--dsq-levels", LEVELS, "--dsq-rise-at", 0.75]  # fmt: skip
    whole = tmp_path / "whole"
    run("train", data, *flags, "--save-dir", whole)
    first, second = updates(whole)
    assert first + second > 6  # an epoch has several
    assert first == math.ceil(0.75 * (first + second))
    (cost,) = [line for line in caplog.messages if line.startswith("DSQ cost to expect")]
    assert len(re.findall(r" 0\.\d+ in all", cost)) == 2
    resumed = resume(data, flags, whole, "checkpoint_1_2.pt")
    assert contents(resumed)["dsq_history.json"] == contents(whole)["dsq_history.json"]


def test_of_a_run_that_began_without_dsq_fractions_are_of_what_is_left(data: Path, tmp_path: Path) -> None:
    flags = [*MODEL, "--disable-validation", "--save-dir", tmp_path]
    run("train", data, *flags, "--max-update", 3)
    run("train", data, *flags, "--max-update", 7, "--dsq-levels", LEVELS, "--dsq-rise-at", 0.5)
    assert updates(tmp_path) == [2, 2]


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
    flags = [data, *MODEL, "--lr", 0, "--save-interval-updates", 1, "--dsq-patience", 1, "--dsq-levels", LEVELS]
    flags += ["--save-dir", tmp_path]
    run("train", *flags, "--max-update", 1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    flags += ["--distributed-backend", "gloo", "--ddp-backend", "legacy_ddp", "--max-update", 4]
    workers = [start("-c", WORKER, *flags, RANK=str(rank), **meeting) for rank in range(2)]
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
    first_update = record["tokens"] - sum(counts)  # the update before; the others count the tokens of both workers
    assert len(counts) == 3
    assert 0 < first_update < min(counts)


@pytest.mark.parametrize(
    ("max_update", "max_epoch", "update_freq", "skip", "expected"),
    [
        (0, 0, [1], False, 0),
        (7, 0, [1], False, 7),
        (0, 3, [1], False, 30),
        (100, 3, [1], False, 30),
        (7, 3, [1], False, 7),
        (0, 3, [4], False, 9),
        (0, 3, [4], True, 6),
        (0, 4, [1, 2], False, 10 + 3 * 5),
        (0, 1, [1, 2], False, 10),
    ],
)
def test_what_comes_first_ends_a_run_of_ten_batches_an_epoch(max_update, max_epoch, update_freq, skip, expected):
    options = {"max_update": max_update, "max_epoch": max_epoch, "update_freq": update_freq}
    assert total_updates(SimpleNamespace(**options, skip_remainder_batch=skip), 10) == expected
