import dataclasses

import pytest
import torch

import dsq
from dsq.formats import SignedNVInt


def test_parse_and_print():
    assert dsq.Precision.parse(" [16, 4,4,16] ") == dsq.Precision(16, 4, 4, 16)
    assert str(dsq.Precision(2, 2, 2, 16)) == "[2,2,2,16]"
    assert tuple(dsq.Precision.parse("16,4,4,16")) == (16, 4, 4, 16)


@pytest.mark.parametrize(
    "levels",
    [
        "[2,2,2,16], [16,4,4,16]",
        ["[2,2,2,16]", "16,4,4,16"],
        [[2, 2, 2, 16], (16, 4, 4, 16)],
        [dsq.Precision(2, 2, 2, 16), "[16,4,4,16]"],
        ["[2,2,2,16] [16,4,4,16]"],
    ],
)
def test_levels_in_every_form(levels):
    assert dsq.DSQConfig(levels=levels).levels == (dsq.Precision(2, 2, 2, 16), dsq.Precision(16, 4, 4, 16))
    assert dsq.DSQConfig(levels=[4, 4, 4, 16]).levels == (dsq.Precision(4, 4, 4, 16),)


def test_a_field_describes_itself():
    described = {option.name: option.metadata for option in dataclasses.fields(dsq.DSQConfig)}
    assert all(option["help"] and option["kind"] in (bool, int, float, str) for option in described.values())
    assert described["rounding"]["choices"] == ("nearest", "stochastic")
    assert dsq.DSQConfig("[4,4,4,8] [8,4,4,8]", rise_at="0.8").rise_at == (0.8,)


def test_a_low_q3_of_fixed_point_is_allowed_with_one_warning(recwarn):
    with pytest.warns(UserWarning, match=r"\[8,8,8,8\].*Appendix C") as caught:
        dsq.DSQConfig(levels=("[8,8,8,8]", "[16,8,8,16]"), format="fixed")
    assert len(caught) == 1
    recwarn.clear()
    dsq.DSQConfig(levels="[8,8,8,8]")
    assert not recwarn.list


def test_quantizers_of_a_level_and_by_default_snvint_alone_where_bfp_is_not_as_good():
    levels = "[4,4,4,16] [16,4,4,16]"
    config = dsq.DSQConfig(levels=levels, format="fixed", fraction_bits=4, rounding="stochastic", gemm="float32")
    q = config.at(1)
    assert q.precision == dsq.Precision(16, 4, 4, 16)
    assert q.q1 == dsq.FixedPoint(4, 4)
    assert (q.rounding, q.gemm) == ("stochastic", "float32")
    assert q.backward_weight.bits == 5
    assert dsq.DSQConfig("[16,4,4,16]", format="bfp", min_weight_bits=0).at(0).backward_weight == dsq.BFP(4)  # Q1
    assert dsq.DSQConfig(levels="[8,8,8,16]", block_size=32).at(0).q0 == dsq.BFP(8, block_size=32)
    q = dsq.DSQConfig().at(0)
    assert dsq.DSQConfig().format == "snvint"
    assert (q.q0, q.q1, q.q2, q.q3) == (dsq.BFP(8), SignedNVInt(4), dsq.BFP(8), dsq.BFP(8))


def test_wide_formats_keep_the_tensor():
    x = torch.randn(3, 5)
    for fmt in (dsq.FixedPoint(17), dsq.FixedPoint(32), dsq.Identity()):
        assert torch.equal(dsq.quantize(x, fmt), x)
        assert dsq.pack(x, fmt).codes.data_ptr() == x.data_ptr()
        assert dsq.pack(x, fmt).nbytes == x.nbytes
    for wide in (dsq.DSQConfig(levels="[32,4,4,32]").at(0).q0, dsq.Quantizers.of("[32,4,4,32]").q0):
        assert wide == dsq.Identity(32)  # of the families bfp alone has a grid so fine


@pytest.mark.filterwarnings("error")
def test_widths_that_damaged_training_are_warned_of():
    dsq.DSQConfig(levels="[4,3,3,8] [8,4,4,8]")
    dsq.DSQConfig(levels="[4,3,3,8]", format="bfp")
    needed = "may damage training, which needed 4, 3 and 3 bits at q0, q1 and q2: of 28.9 BLEU snvint lost with"
    with pytest.raises(UserWarning, match=rf"^\[2,2,2,16\] {needed} 4 bits 0.7, 3 bits 1.9, 2 bits 11.9$"):
        dsq.DSQConfig(levels="[2,2,2,16] [16,4,4,16]")
    with pytest.raises(UserWarning, match=r"^\[3,3,3,16\] may damage .* bfp lost with 4 bits"):
        dsq.DSQConfig(levels="[3,3,3,16]", format="bfp")


def test_help_explains_every_option():
    for option in dataclasses.fields(dsq.DSQConfig):
        assert f"    {option.name}: {option.metadata['help'][:20]}" in dsq.DSQConfig.__doc__
