"""Bytes of packed tensors, and precisions as text."""

import numpy as np
import pytest
import torch

import dsq
from costmodel.formats import Format, Precision, container_bits, exponent_bytes, packed_bytes, parse_precision


@pytest.mark.parametrize("bits", [2, 3, 4, 7, 8, 13, 16, 32])
@pytest.mark.parametrize("rows, columns", [(1, 1), (5, 7), (16, 16), (17, 33), (48, 31)])
def test_packed_bytes_equal_what_dsq_packs(rows, columns, bits):
    x = torch.ones(rows, columns)
    for axis, dim in (("rows", 0), ("columns", 1)):
        for box in (8, 16):
            got = packed_bytes(1, rows, columns, bits, Format("bfp", box), axis)
            assert got == dsq.pack(x, dsq.BFP(bits, box), dim=dim).nbytes
    assert packed_bytes(1, rows, columns, bits, Format("fixed"), "columns") == dsq.pack(x, dsq.FixedPoint(bits)).nbytes


def test_a_box_of_sixteen_at_four_bits_takes_nine_bytes():
    assert packed_bytes(1, 1, 16, 4, Format("bfp"), "columns") == 9
    assert packed_bytes(1, 16, 1, 4, Format("bfp"), "rows") == 16 + 1  # a bitstream a row, one exponent
    assert packed_bytes(1, 16, 1, 4, Format("bfp", box_axis="last"), "rows") == 16 + 16
    assert packed_bytes(3, 1, 16, 4, Format("float"), "columns") == 24


def test_exponents_are_what_box_storage_adds():
    for fmt, size in (
        (Format("bfp"), 5 * 3),
        (Format("bfp", box=8), 5 * 5),
        (Format("fixed"), 1),
        (Format("float"), 0),
    ):
        assert exponent_bytes(1, 5, 33, 4, fmt, "columns") == size
        assert packed_bytes(1, 5, 33, 4, fmt, "columns") == 5 * 17 + size
    assert exponent_bytes(1, 5, 33, 32, Format("bfp"), "columns") == 0


def test_arrays_give_what_scalars_give():
    widths = np.array([2, 5, 16, 17, 32])
    for kind in ("bfp", "fixed", "float"):
        array = packed_bytes(2, 5, 33, widths, Format(kind), "rows")
        assert array.tolist() == [packed_bytes(2, 5, 33, int(m), Format(kind), "rows") for m in widths]


def test_container_is_wide_only_if_a_width_is():
    assert container_bits(Precision(2, 2, 2, 16)) == 16
    assert container_bits(Precision(2, 2, 2, 17)) == 32


@pytest.mark.parametrize("text", ["[16,4,4,16]", "16,4,4,16", " [16, 4, 4, 16] "])
def test_precision_is_read(text):
    assert parse_precision(text) == (None, Precision(16, 4, 4, 16))
    assert parse_precision("fixed:" + text.strip()) == ("fixed", Precision(16, 4, 4, 16))
    assert str(Precision(16, 4, 4, 16)) == "[16,4,4,16]"


@pytest.mark.parametrize(
    "text", ["", "16", "[16,4,4]", "[16,4,4,16,2]", "[16,4,-4,16]", "[a,b,c,d]", "[1,4,4,16]", "[16,4,4,33]"]
)
def test_malformed_precision_is_named(text):
    with pytest.raises(ValueError, match="16,4,4,16"):
        parse_precision(text)


@pytest.mark.parametrize(
    "field, value", [("kind", "float8"), ("box", 0), ("box", -16), ("exponent_bits", 0), ("box_axis", "columns")]
)
def test_malformed_format_is_named(field, value):
    with pytest.raises(ValueError, match=str(value)):
        Format(**{field: value})
