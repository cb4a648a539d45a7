import pytest

import dsq
from dsq.formats.signed_nvint import SignedNVInt


def test_parse_and_print():
    assert dsq.Precision.parse(" [16, 4,4,16] ") == dsq.Precision(16, 4, 4, 16)
    assert str(dsq.Precision(2, 2, 2, 16)) == "[2,2,2,16]"
    assert tuple(dsq.Precision.parse("16,4,4,16")) == (16, 4, 4, 16)
    assert dsq.parse_levels("[2,2,2,16], [16,4,4,16]") == (dsq.Precision(2, 2, 2, 16), dsq.Precision(16, 4, 4, 16))


@pytest.mark.parametrize("text", ["[2,2]", "[2,2,2,0]", "[a,b,c,d]", "[2,2,2,1]", "[2,2,2,33]", "", "[2,2,2,16", "4"])
def test_a_malformed_precision_says_what_is_accepted(text):
    with pytest.raises(ValueError, match=r"precision must be four whole numbers in 2\.\.32, as in \[16,4,4,16\]"):
        dsq.Precision.parse(text)
    with pytest.raises(ValueError, match="precision must be four whole numbers"):
        dsq.parse_levels(text)


@pytest.mark.parametrize(
    "levels",
    [
        "[2,2,2,16] [16,4,4,16]",
        ["[2,2,2,16]", "16,4,4,16"],
        [[2, 2, 2, 16], (16, 4, 4, 16)],
        [dsq.Precision(2, 2, 2, 16), "[16,4,4,16]"],
    ],
)
def test_levels_in_every_form(levels):
    assert dsq.DSQConfig(levels=levels).levels == (dsq.Precision(2, 2, 2, 16), dsq.Precision(16, 4, 4, 16))
    assert dsq.DSQConfig(levels=[4, 4, 4, 16]).levels == (dsq.Precision(4, 4, 4, 16),)


def test_levels_never_decrease():
    with pytest.raises(ValueError, match=r"never decrease.*\[16,4,4,16\] before \[2,2,2,16\]"):
        dsq.DSQConfig(levels=("[16,4,4,16]", "[2,2,2,16]"))
    with pytest.raises(ValueError, match="got none"):
        dsq.DSQConfig(levels=())


def test_a_low_q3_of_fixed_point_is_allowed_with_one_warning(recwarn):
    with pytest.warns(UserWarning, match=r"\[8,8,8,8\].*Appendix C") as caught:
        dsq.DSQConfig(levels=("[8,8,8,8]", "[16,8,8,16]"), format="fixed")
    assert len(caught) == 1
    recwarn.clear()
    dsq.DSQConfig(levels="[8,8,8,8]")
    assert not recwarn.list


def test_quantizers_of_a_level():
    levels = "[4,4,4,16] [16,4,4,16]"
    config = dsq.DSQConfig(levels=levels, format="fixed", fraction_bits=4, rounding="stochastic", box_axis="last")
    q = config.at(1)
    assert q.precision == dsq.Precision(16, 4, 4, 16)
    assert q.q1 == dsq.FixedPoint(4, 4)
    assert (q.rounding, q.box_axis) == ("stochastic", "last")
    assert dsq.DSQConfig(levels="[8,8,8,16]", box=32).at(0).q0 == dsq.BFP(8, box=32)


def test_the_default_format_is_snvint_and_bfp_where_that_is_as_good():
    q = dsq.DSQConfig().at(1)
    assert dsq.DSQConfig().format == "snvint"
    assert (q.q0, q.q1, q.q2, q.q3) == (dsq.BFP(8), SignedNVInt(4), SignedNVInt(4), dsq.BFP(8))


def test_a_config_saved_with_another_format_keeps_it():
    saved = dsq.DSQConfig(format="bfp").as_dict()
    assert saved["format"] == "bfp"
    assert dsq.DSQConfig.from_dict(saved).at(0).q0 == dsq.BFP(4)


@pytest.mark.filterwarnings("error")
def test_two_bits_are_warned_of_in_bfp_alone():
    dsq.DSQConfig(levels="[2,2,2,16]")
    with pytest.raises(UserWarning, match=r"2 bits of bfp in \[2,2,2,16\].*snvint loses less"):
        dsq.DSQConfig(levels="[2,2,2,16]", format="bfp")


@pytest.mark.parametrize(
    "option",
    [
        {"format": "float"},
        {"rounding": "up"},
        {"box_axis": "first"},
        {"box": 0},
        {"levels": None},
        {"patience": 0},
        {"patience": True},
        {"eval_full_precision": "no"},
        {"threshold": 1},
        {"threshold": "a little"},
        {"exclude": "("},
        {"exclude": 3},
        {"box": 3, "format": "fixed"},
        {"fraction_bits": 4},
    ],
)
def test_a_bad_option_is_named(option):
    with pytest.raises(ValueError, match=f"^{next(iter(option))} "):
        dsq.DSQConfig(**option)
