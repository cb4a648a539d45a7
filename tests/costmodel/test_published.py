"""Published trainings: what is left out, how the halves are drawn, and how far off the predictions are."""

from statistics import median

import pytest

from tests.costmodel.published import HALVES, halves, included, judged, runs


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
    mine = [record for record in records if record["half"] == half]
    ratios = [record["ratio"] for record in mine]
    off = [abs(ratio - 1) for ratio in ratios]
    assert median(off) <= 0.10
    assert sum(one <= 0.25 for one in off) >= 0.9 * len(off)
    assert 0.6 < min(ratios) < max(ratios) < 1.4
    assert all(record["fits"] for record in mine)
    peaks = [abs(record["of_peak"] - 1) for record in mine if record["of_peak"]]
    assert half != "others" or median(peaks) <= 0.08
