"""What DSQConfig warns of is what the committed ledgers show."""

import warnings

import pytest

import dsq
from analysis import ROOT
from analysis.experiments.ledger import Configuration, configurations, read_ledger
from dsq.precision import NEEDED, STOCHASTIC


def against_fp32() -> dict[str, tuple[Configuration, float]]:
    """Translation's runs: by name, each with what it gains on fp32 in the mean of its seeds."""
    found: dict[str, tuple[Configuration, float]] = {}
    for name in ("ablations", "demo_formats", "multi30k"):
        for recipe, group in configurations(read_ledger(ROOT / "analysis" / "results" / f"{name}.csv")).items():
            floats = [one for one in group if one.is_float]
            quantised = [one for one in group if not one.is_float]
            found |= {f"{recipe} {one.name}": (one, one.above(floats[0])) for one in quantised if floats}
    return found


def warns(one: Configuration) -> bool:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        levels, format, rounding = (one.first[name] for name in ("levels", "format", "rounding"))
        dsq.DSQConfig(levels=dsq.parse_levels(levels), format=format, rounding=rounding)
    return any("may damage training" in str(warning.message) for warning in caught)


@pytest.mark.parametrize("format", ["snvint", "sbfp", "bfp", "fixed"])
def test_what_lost_four_points_is_warned_of_and_what_lost_one_is_not(format: str) -> None:
    runs = {name: (one, gain) for name, (one, gain) in against_fp32().items() if one.first["format"] == format}
    bad = {name for name, (_, gain) in runs.items() if gain < -4}
    good = {name for name, (one, gain) in runs.items() if gain > -1 and not one.first["rise_at"]}
    assert bad
    assert good
    assert {name for name in bad if not warns(runs[name][0])} == set()
    assert {name for name in good if warns(runs[name][0])} == set()


@pytest.mark.parametrize(
    "run",
    [
        *("snvint_2-2-2-16", "snvint_2-2-2-16_16-4-4-16_at0.5", "sbfp_3-3-3-16", "sbfp_2-2-2-16"),
        *("bfp_3-3-3-16", "bfp_2-2-2-16", "fixed_4-4-4-16"),
    ],
)
def test_few_bits_lost_what_the_warning_says(run: str) -> None:
    lost = round(-against_fp32()[f"ablations {run}"][1])
    assert str(lost) in NEEDED[run.partition("_")[0]].lost.replace(";", "").replace(",", "").split()


@pytest.mark.parametrize(("format", "lost"), STOCHASTIC.items())
def test_stochastic_rounding_lost_what_the_warning_says(format: str, lost: tuple[float, float]) -> None:
    runs = against_fp32()
    found = [runs[f"ablations {format}_4-4-4-16{rounding}"][1] for rounding in ("_rounding=stochastic", "")]
    assert [round(-gain, 1) for gain in found] == list(lost)
