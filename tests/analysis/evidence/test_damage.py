"""What DSQConfig warns of is what the suite's ledger shows."""

import warnings

import pytest

import dsq
from analysis.evidence.ledger import LEDGER, read_rows
from analysis.evidence.suite import FP32, Setting, load_suite
from dsq.formats import DEFAULT
from dsq.precision import BLEU, LOST, STOCHASTIC

SUITE = load_suite()
ROWS = read_rows(LEDGER, SUITE)
TASK = "multi30k-900"


def lost(setting: str) -> float:
    """BLEU, to fp32 of the first seed."""
    return float(ROWS[TASK, FP32, 1]["score"]) - float(ROWS[TASK, setting, 1]["score"])


def warns(setting: Setting) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        dsq.DSQConfig(setting.levels, format=setting.format, rounding=setting.rounding)
    return any("may damage training" in str(warning.message) for warning in caught)


def static() -> list[Setting]:
    """The settings of one level whose run is in the ledger, but those of a fixed binary point."""
    return [
        one
        for one in SUITE.settings.values()
        if (TASK, one.name, 1) in ROWS
        if one.levels and one.rise_at is None and one.stash == "linears" and not one.options
    ]


@pytest.mark.parametrize("setting", static(), ids=lambda setting: setting.name)
def test_what_lost_more_than_a_point_and_a_half_is_warned_of_and_what_lost_less_than_one_is_not(
    setting: Setting,
) -> None:
    if not 1 < lost(setting.name) < 1.5:
        assert warns(setting) == (lost(setting.name) > 1)


def test_what_is_lost_is_of_the_ledgers_fp32() -> None:
    assert round(float(ROWS[TASK, FP32, 1]["score"]), 1) == BLEU


@pytest.mark.parametrize(("format", "bits"), [(format, bits) for format, by_bits in LOST.items() for bits in by_bits])
def test_the_warnings_figures_are_the_ledgers(format: str, bits: int) -> None:
    levels = f"[{bits},{bits},{bits},{16 if format == 'fixed' else 8}]"
    name = levels if (format, bits) == (DEFAULT, 4) else f"{format} {levels}"
    assert LOST[format][bits] == round(lost(name), 1)


@pytest.mark.parametrize("format", STOCHASTIC)
def test_the_figures_of_stochastic_rounding_are_the_ledgers(format: str) -> None:
    assert STOCHASTIC[format] == round(lost(f"{format} [4,4,4,8] stochastic"), 1)
