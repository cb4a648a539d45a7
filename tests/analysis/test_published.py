"""Published trainings: what is left out, how the halves are drawn, and how far off the predictions are."""

import pytest

from analysis.published import HALVES, halves, included, judged, runs, summary


def test_the_halves_share_no_training_and_leave_out_what_is_not_modelled():
    fitted, judging = halves()
    assert len(fitted) == len(judging) == 52
    assert not any(row in judging for row in fitted)
    assert not any("fp8" in row["precision"] or "interleaved" in row["layout"] for row in included())


@pytest.fixture(scope="module")
def records():
    return [judged(run) for run in runs()]


@pytest.mark.parametrize("half", HALVES)
def test_predicted_throughput_is_near_what_was_published(records, half):
    found = summary([record for record in records if record["half"] == half])
    assert found["median off"] <= 0.10
    assert found["within 25%"] >= 0.9
    assert found["least"] > 0.6
    assert found["most"] < 1.4
    assert not found["told not to fit"]
    assert half != "others" or found["peaks off"] <= 0.08
