"""Which products of codes the int8 tensor cores take; that they are right, the conformance suite shows."""

import pytest
import torch

from dsq.formats import BFP, FixedPoint, Layout, SignedBFP, SignedNVInt
from dsq.kernels.backend import Codes, MatMul, Operand
from dsq.kernels.triton.backend import TRITON
from dsq.kernels.triton.gemm import GEMMS

INT8 = GEMMS[3]
FORWARD = {"axis": 1}, {"axis": 1, "transposed": True}  # x and w, boxes along the in-features


@pytest.mark.parametrize(
    ("a", "b", "fits"),
    [
        (BFP(4), BFP(4), True),
        (SignedBFP(2), SignedNVInt(8), True),
        (FixedPoint(8), FixedPoint(3), True),
        (BFP(9), BFP(4), False),
        (BFP(4, 16), BFP(4, 32), False),
        (BFP(4, 12), BFP(4, 12), False),
        (BFP(4), FixedPoint(4), False),
        (BFP(4), None, False),
    ],
)
def test_codes_of_a_byte_with_boxes_of_one_length(a, b, fits):
    matmul = MatMul(Operand(a, **FORWARD[0]), Operand(b, **FORWARD[1]))
    assert INT8.fits(matmul, torch.float32) == fits


def test_boxes_have_to_run_along_the_contraction():
    across = Operand(BFP(4), 0)
    assert not INT8.fits(MatMul(across, Operand(BFP(4), **FORWARD[1])), torch.float32)
    assert not INT8.fits(MatMul(Operand(BFP(4), 1), Operand(BFP(4), 0), exact=False), torch.float32)
    assert not INT8.fits(MatMul(Operand(BFP(4), 1), Operand(BFP(4), 0)), torch.bfloat16)


def test_an_empty_product_is_the_bias():
    pytest.importorskip("triton")
    matmul, bias = MatMul(Operand(BFP(4), **FORWARD[0]), Operand(BFP(4), **FORWARD[1])), torch.tensor([1.0, 2.0])
    a, b = (TRITON.pack(torch.empty(rows, 0), BFP(4), Layout.of((rows, 0), 1), None) for rows in (3, 2))
    y = INT8.run(matmul, Codes(*a, torch.Size((3, 0))), Codes(*b, torch.Size((2, 0))), bias)
    assert torch.equal(y, bias.expand(3, 2))
