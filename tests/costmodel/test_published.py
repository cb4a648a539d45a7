"""Published trainings against predictions: every row of analysis/results/published_runs.csv (published.py)."""

import csv
from statistics import median

import pytest

from analysis.published import (
    RUNS,
    commanded,
    described,
    included,
    judged,
    judged_now,
    judged_once,
    kind_of_row,
    memory_of,
    published,
    residuals,
    result,
)
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.planning.step import RANGES


@pytest.mark.parametrize("half", ["judging", "others", "fitted"])
def test_predicted_throughput_is_near_what_was_published(half):
    mine = [judged(row) for row in published() if row["half"] == half]
    ratios = [record["ratio"] for record in mine]
    off = [abs(ratio - 1) for ratio in ratios]
    assert median(off) <= 0.10
    assert sum(one <= 0.25 for one in off) >= 0.9 * len(off)
    assert 0.6 < min(ratios) < max(ratios) < 1.5
    assert all(record["fits"] for record in mine)
    peaks = [abs(record["of_peak"] - 1) for record in mine if record["of_peak"]]
    assert half != "others" or median(peaks) <= 0.07


def test_what_the_command_line_says_is_near_what_was_published(tmp_path):
    """Memory: the least is QLoRA where bitsandbytes kept the inputs of each layer (0.41), and reserved blocks."""
    found = [commanded(row, tmp_path) for row in published() if row["table"] == "commands"]
    assert all(record["fits"] for record in found)
    for name, at_most, least, most in (("ratio", 0.15, 0.7, 1.7), ("of_peak", 0.08, 0.7, 1.15)):
        ratios = [record[name] for record in found if record[name]]
        off = [abs(ratio - 1) for ratio in ratios]
        assert len(off) >= 30
        assert median(off) <= at_most
        assert sum(one <= 0.3 for one in off) >= 0.8 * len(off)
        assert least < min(ratios) < max(ratios) < most


def test_the_committed_results_are_what_is_predicted(tmp_path):
    """Each seventh row of published.csv (python -m analysis.published write)."""
    with RUNS.with_name("published.csv").open(newline="", encoding="utf-8") as lines:
        listed = list(csv.DictReader(lines))
    rows = included()
    assert len(listed) == len(rows)
    for row, stated in list(zip(rows, listed, strict=True))[::7]:
        found = result(row, tmp_path)
        assert (stated["kind"], stated["fits"]) == (kind_of_row(row), "yes")
        assert float(stated["predicted"]) == pytest.approx(found["predicted"], rel=1e-3)
        assert float(stated["peak_GB"]) == pytest.approx(found["peak"] / 1e9, rel=1e-3)


def test_what_was_judged_once_is_what_is_predicted(tmp_path):
    """Each ninth row of published_once.csv."""
    for row in judged_once()[::9]:
        assert row == judged_now(row, tmp_path)


#: kind -> of all rows: of the half that the range was fitted to how many there are, and how many times lie in the range
#: that is printed; and of the other half
WITHIN = {
    "eager": ((83, 70), (60, 53)),
    "several nodes": ((33, 29), (28, 23)),
    "GDDR": ((18, 16), (12, 8)),
    "compiled": ((38, 33), (35, 27)),
}


def test_most_published_times_lie_in_the_range_that_is_printed():
    """All rows are counted: those that were fitted, those of programs that nothing was fitted to, and those that were
    judged once."""
    counted = {kind: {"fitted": (0, 0), "judging": (0, 0)} for kind in WITHIN}
    for one in residuals():
        (low, high), (rows, within) = RANGES[one.kind], counted[one.kind][one.half]
        counted[one.kind][one.half] = (rows + 1, within + (low <= one.time <= high))
    assert {kind: tuple(halves.values()) for kind, halves in counted.items()} == WITHIN
    for halves in WITHIN.values():
        rows, within = map(sum, zip(*halves, strict=True))
        assert 0.75 <= within / rows <= 0.93
        (rows, within) = halves[1]
        assert 8 / 12 <= within / rows <= 53 / 60


@pytest.mark.parametrize(("loss", "refused"), [("16 bits", 0), ("fp32", 25)])
def test_all_trainings_of_mpt_are_told_to_fit_with_the_loss_that_llm_foundry_has(loss, refused):
    rows = [row | {"loss": loss} for row in published() if row["table"] == "mpt" and row["profile"]]
    fit = [memory_of(row, *described(row)).peak <= load_hardware(row["profile"]).memory_bytes for row in rows]
    assert (fit.count(False), len(fit)) == (refused, 104)
