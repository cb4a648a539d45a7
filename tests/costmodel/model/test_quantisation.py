"""Bytes of packed tensors in arrays of widths, and what a setup refuses."""

import numpy as np
import pytest

from costmodel.model.quantisation import PrecisionGrid, Setup, multiplier_bits, nbytes, scale_bytes
from dsq.formats import BFP, FixedPoint, Identity
from dsq.precision import Precision

FORMATS = (BFP(32), BFP(32, box=8), FixedPoint(32), Identity())


def of(template, precision=(16, 4, 4, 16), box_axis="contraction"):
    return Setup(template, Precision(*precision), box_axis)


def test_a_box_of_sixteen_at_four_bits_takes_nine_bytes():
    along, last = of(BFP(32)), of(BFP(32), box_axis="last")
    assert nbytes(BFP(32), 4, along.layout(1, 1, 16, "columns")) == 9
    assert nbytes(BFP(32), 4, along.layout(1, 16, 1, "rows")) == 16 + 1  # a bitstream a row, one exponent
    assert nbytes(BFP(32), 4, last.layout(1, 16, 1, "rows")) == 16 + 16
    assert nbytes(Identity(), 4, along.layout(3, 1, 16, "columns")) == 24


@pytest.mark.parametrize("template, size", zip(FORMATS, (5 * 3, 5 * 5, 1, 0), strict=True), ids=str)
def test_scales_are_what_box_storage_adds(template, size):
    layout = of(template).layout(1, 5, 33, "columns")
    assert scale_bytes(template, 4, layout) == size
    assert nbytes(template, 4, layout) == 5 * 17 + size
    assert scale_bytes(template, 32, layout) == 0
    assert nbytes(template, 32, layout) == 4 * 5 * 33


@pytest.mark.parametrize("template", FORMATS, ids=str)
def test_arrays_give_what_scalars_give(template):
    widths, layout = np.array([2, 5, 16, 17, 32, 5]), of(template).layout(2, 5, 33, "rows")
    for function, rest in ((nbytes, [layout]), (scale_bytes, [layout]), (multiplier_bits, [])):
        assert function(template, widths, *rest).tolist() == [function(template, int(m), *rest) for m in widths]


def test_a_multiplier_sees_codes_or_significands():
    assert [multiplier_bits(BFP(32), m) for m in (2, 16, 32)] == [2, 16, 32]
    assert [multiplier_bits(Identity(), m) for m in (8, 16, 17, 32)] == [8, 11, 24, 24]


def test_container_is_wide_only_if_a_width_is():
    assert of(BFP(32), (2, 2, 2, 16)).container_bits == 16
    assert of(BFP(32), (2, 2, 2, 17)).container_bits == 32
    grid = PrecisionGrid(*np.array([(2, 2, 2, 16), (2, 17, 2, 16)]).T)
    assert Setup(BFP(32), grid).container_bits.tolist() == [16, 32]
    assert grid[1] == Precision(2, 17, 2, 16)


def test_an_unknown_box_axis_is_named():
    with pytest.raises(ValueError, match="box_axis must be one of contraction, last, got 'columns'"):
        of(BFP(32), box_axis="columns")
