"""A run's record of work."""

import json

import pytest

from costmodel.cli.commands.estimate import load_history
from costmodel.model.methods import Setup
from dsq.formats import FixedPoint
from dsq.precision import Precision
from dsq.scheduler import PrecisionScheduler

DESCRIBED = {"format": "bfp", "box_axis": "contraction"}


def write(tmp_path, data):
    path = tmp_path / "history.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_history_of_a_real_scheduler(tmp_path):
    scheduler = PrecisionScheduler(["[2,2,2,16]", "[16,4,4,16]"], patience=1)
    scheduler.record(updates=30, tokens=3000)
    scheduler.step(1.0)
    assert scheduler.step(1.0)
    scheduler.record(updates=10, tokens=1000)
    history = load_history(write(tmp_path, scheduler.history()), DESCRIBED)
    assert [setup.precision for setup in history.setups] == [Precision(2, 2, 2, 16), Precision(16, 4, 4, 16)]
    assert history.shares == [0.75, 0.25]
    assert (history.unit, str(history.setups[0].format)) == ("tokens", "bfp:bits=32,box=16,exponent_bits=8")


def test_history_without_tokens_weighs_updates_and_may_name_its_format(tmp_path):
    levels = [{"precision": [2, 2, 2, 16], "updates": 1}, {"precision": [16, 4, 4, 16], "updates": 4}]
    run = {"format": "fixed", "box": 32, "box_axis": "last", "levels": levels}
    history = load_history(write(tmp_path, run), DESCRIBED)
    assert history.shares == [0.2, 0.8]
    assert history.unit == "updates"
    assert history.recorded == {"format": "fixed", "box_axis": "last"}  # fixed point has no box
    assert history.setups[0] == Setup(FixedPoint(32), Precision(2, 2, 2, 16), "last")


def test_history_with_tokens_at_some_levels_weighs_updates(tmp_path):
    levels = [
        {"precision": [2, 2, 2, 16], "updates": 10, "tokens": 0},
        {"precision": [16, 4, 4, 16], "updates": 30, "tokens": 500},
        {"precision": [16, 16, 16, 16]},
    ]
    history = load_history(write(tmp_path, {"levels": levels}), DESCRIBED)
    assert history.shares == [0.25, 0.75, 0]
    assert history.unit == "updates"
    history = load_history(write(tmp_path, {"levels": levels[1:]}), DESCRIBED)  # no work at the last: no matter
    assert (history.shares, history.unit) == ([1, 0], "tokens")


@pytest.mark.parametrize(
    "data, message",
    [
        ([], "field levels must be a list"),
        ({"levels": []}, "field levels must be a list"),
        ({"levels": [{"precision": "[2,2,2,16]"}]}, r"levels\[0\].precision must be a list"),
        ({"levels": [{"precision": [2, 2, 2]}]}, r"levels\[0\].precision"),
        ({"levels": [{"precision": [2, 2, 2, 16], "updates": -1}]}, r"levels\[0\].updates must be a whole number"),
        ({"levels": [{"precision": [2, 2, 2, 16], "tokens": 1.5}]}, r"levels\[0\].tokens must be a whole number"),
        ({"levels": [{"precision": [2, 2, 2, 16], "updates": 0}]}, "no level records any work"),
        (
            {"workload": 1, "levels": [{"precision": [2, 2, 2, 16], "updates": 1}]},
            "field workload must be the name of a file",
        ),
        ({"format": "int", "levels": [{"precision": [2, 2, 2, 16], "updates": 1}]}, "format must be one of"),
    ],
)
def test_bad_history_names_the_field(data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        load_history(write(tmp_path, data), DESCRIBED)
