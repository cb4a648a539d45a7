"""The table's statistics against values computed by hand; what DSQConfig warns of is what the ledger shows."""

import math
import warnings
from dataclasses import replace

import pytest

import dsq
from analysis.evidence.comparison import PAGE, YARDSTICK, Evidence, Mean, over_tasks, page_tables
from analysis.evidence.ledger import LEDGER, read_rows
from analysis.evidence.suite import FP32, Setting, load_suite
from analysis.tables import written
from dsq.costmodel.model.methods import TRUSTED
from dsq.formats import DEFAULT
from dsq.precision import BLEU, LOST, STOCHASTIC

SUITE = load_suite()


def rows(losses: dict[tuple[str, str], list[float]]) -> Evidence:
    """Scores are 100 less ten times the losses."""
    results = {
        (task, setting, seed): {"loss": str(loss), "score": str(100 - 10 * loss)}
        for (task, setting), values in losses.items()
        for seed, loss in enumerate(values, start=1)
    }
    return Evidence(SUITE, results)


def page(evidence: Evidence) -> str:
    return written(PAGE.read_text(encoding="utf-8"), page_tables(evidence))


def test_interval_of_three_values() -> None:
    one = Mean((0.01, 0.02, 0.06))
    assert one.mean == pytest.approx(0.03)
    assert one.standard_error == pytest.approx(0.0264575 / math.sqrt(3), rel=1e-5)  # deviations -.02, -.01, .03
    assert one.half == pytest.approx(4.303 * 0.0152753, rel=1e-4)
    assert one.text("+.3f") == "+0.030 ± 0.066"


def test_interval_of_many_values_and_of_one() -> None:
    assert Mean((1.0, -1.0) * 15).half == pytest.approx(2.086 * 1.0170953 / math.sqrt(30), rel=1e-4)
    assert Mean((0.5,)).text("+.2f") == "+0.50"
    assert Mean(()).text("+.2f") is None


def test_differences_are_paired_by_seed() -> None:
    evidence = rows({("enja", FP32): [3.0, 4.0, 5.0], ("enja", "schedule"): [3.1, 4.2]})
    assert evidence.losses("enja", "schedule").values == pytest.approx((0.1, 0.2))
    assert evidence.scores("enja", "schedule").values == pytest.approx((-1, -2))


def test_differences_of_a_classifier_are_relative() -> None:
    evidence = rows({("mrpc", FP32): [0.5, 0.4], ("mrpc", "schedule"): [0.6, 0.4]})
    assert evidence.losses("mrpc", "schedule").values == pytest.approx((0.2, 0.0))


def test_a_cell_of_settings_by_task_has_loss_and_score() -> None:
    evidence = rows({("enja", FP32): [3.0, 4.0], ("enja", "mxint8"): [3.1, 4.2], ("vit", FP32): [1.0]})
    text = page_tables(evidence)["setting-by-task"]("enja,vit", "mxint8", "hfp8")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    assert lines[0] == ["setting", "enja", "vit"]
    assert lines[2] == ["mxint8", "+0.150 ± 0.635; -1.50 ± 6.35", "-"]
    assert lines[3] == ["hfp8", "-", "-"]


def test_mean_over_tasks_is_of_the_tasks_means() -> None:
    enja = {("enja", FP32): [3.0, 3.0], ("enja", "schedule"): [3.1, 3.3], ("enja", YARDSTICK): [3.1, 3.1]}
    evidence = rows(enja | {("wikitext2", FP32): [2.0], ("wikitext2", "schedule"): [2.4]})
    assert evidence.over_tasks(lambda task: evidence.losses(task, "schedule")).values == pytest.approx((0.2, 0.4))
    assert evidence.losses("enja", "schedule", YARDSTICK).values == pytest.approx((0.0, 0.2))
    assert "| schedule      |       2 | +0.300 ± 1.271" in page(evidence)


def test_times_are_of_the_tasks_that_have_them_of_every_row() -> None:
    """ "paper" has none of the second task: the times of both are of the first alone."""
    tasks, names = ("sst2", "wikitext2"), ("schedule", "paper")
    evidence = rows({(task, name): [3.0] for task in tasks for name in (FP32, *names)})
    steps = {(task, name): 60.0 for task in tasks for name in (FP32, "schedule")} | {("sst2", "paper"): 90.0}
    printed = over_tasks(replace(evidence, steps=steps), names)
    assert "time / fp32 (1 tasks)" in printed
    assert [line.split("|")[-2].strip() for line in printed.splitlines()[2:]] == ["1.00", "1.50"]
    assert "time" not in over_tasks(evidence, names)


def test_strays_are_above_the_yardstick_by_more_than_two_standard_errors() -> None:
    fp32 = {(task, FP32): [3.0, 3.0, 3.0] for task in ("enja", "multi30k-900")}
    yardstick = {(task, YARDSTICK): [3.0, 3.0, 3.0] for task in ("enja", "multi30k-900")}
    clear, noisy = [3.1, 3.11, 3.12], [3.3, 3.0, 3.0]
    evidence = rows({**fp32, **yardstick, ("enja", "schedule"): clear, ("multi30k-900", "schedule"): noisy})
    assert evidence.regressions("schedule") == ["enja"]
    assert "- schedule: enja +0.110\n" in page(evidence)


def test_a_suite_without_runs_has_a_page() -> None:
    assert "No pair of runs yet." in page(Evidence(SUITE, {}))


@pytest.mark.parametrize("setting", TRUSTED.values())
def test_what_dsq_cost_advises_is_supported(setting: str) -> None:
    """Over two tasks or more its loss is at most 0.03 above the yardstick's in the mean: nats, or a share."""
    evidence = Evidence(SUITE, read_rows(LEDGER))
    above = evidence.over_tasks(lambda task: evidence.losses(task, setting, YARDSTICK))
    assert len(above.values) > 1
    assert above.mean <= 0.03


def test_bytes_held_are_a_share_of_fp32s_of_the_same_seed() -> None:
    held = {(FP32, 1): "8", (FP32, 2): "", ("schedule", 1): "2", ("schedule", 2): "2"}
    results = {("sst2", *run): {"loss": "1", "score": "1", "saved_mib": mib} for run, mib in held.items()}
    assert Evidence(SUITE, results).saved("sst2", "schedule").values == (0.25,)


# ---- damage

MEASURED = Evidence(SUITE, read_rows(LEDGER, SUITE))
TASK = "multi30k-900"


def lost(setting: str) -> float:
    """BLEU, to fp32 of the same seeds."""
    return -MEASURED.scores(TASK, setting).mean


def warns(setting: Setting) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dsq.DSQConfig(setting.levels, format=setting.format, rounding=setting.rounding, stash="linears")
    return any("may damage training" in str(warning.message) for warning in caught)


def static() -> list[Setting]:
    """The settings of one level whose run is in the ledger, but those of a fixed binary point."""
    return [
        one
        for one in SUITE.settings.values()
        if MEASURED.scores(TASK, one.name).values
        if one.levels and one.rise_at is None and one.stash == "linears" and not one.options
    ]


@pytest.mark.parametrize("setting", static(), ids=lambda setting: setting.name)
def test_a_loss_above_a_point_and_a_half_is_warned_of_and_one_below_a_point_is_not(setting: Setting) -> None:
    if not 1 < lost(setting.name) < 1.5:
        assert warns(setting) == (lost(setting.name) > 1)


def test_what_is_lost_is_of_the_ledgers_fp32() -> None:
    assert round(Mean(tuple(MEASURED.column(TASK, FP32, "score"))).mean, 1) == BLEU


def figures() -> dict[str, float]:
    """BLEU that a warning says a setting lost, by the setting's name."""
    stochastic_figures = {f"{format} [4,4,4,8] stochastic": figure for format, figure in STOCHASTIC.items()}
    for format, by_bits in LOST.items():
        for bits, figure in by_bits.items():
            levels = f"[{bits},{bits},{bits},{16 if format == 'fixed' else 8}]"
            stochastic_figures[levels if (format, bits) == (DEFAULT, 4) else f"{format} {levels}"] = figure
    return stochastic_figures


@pytest.mark.parametrize(("setting", "figure"), figures().items())
def test_the_warnings_figures_are_the_ledgers(setting: str, figure: float) -> None:
    assert figure == round(lost(setting), 1)
