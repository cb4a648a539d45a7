"""quantize and pack as users call them. tests/kernels tests the grids."""

import torch
from torch.utils.flop_counter import FlopCounterMode

import dsq


def test_wide_formats_keep_the_tensor():
    x = torch.randn(3, 5)
    for fmt in (dsq.BFP(17), dsq.BFP(32), dsq.FixedPoint(32), dsq.Identity()):
        assert torch.equal(dsq.quantize(x, fmt), x)
        assert dsq.pack(x, fmt).codes.data_ptr() == x.data_ptr()
        assert dsq.pack(x, fmt).nbytes == x.nbytes


def test_an_overflow_stays_visible():
    x = torch.ones(2, 32)
    x[0, 3] = torch.inf
    assert dsq.quantize(x, dsq.BFP(4)).isnan().tolist() == [[True] * 16 + [False] * 16, [False] * 32]
    assert dsq.quantize(x, dsq.FixedPoint(4)).isnan().all()
    assert dsq.quantize(x, dsq.FixedPoint(4, fraction_bits=2)).isnan().all()


def test_a_packed_tensor_equals_itself_alone():
    x = torch.randn(4, 32)
    packed = dsq.pack(x, dsq.BFP(4))
    assert packed == packed
    assert packed != dsq.pack(x, dsq.BFP(4))
    assert len({packed, packed}) == 1


def test_a_seed_has_64_bits_under_a_dispatch_mode_too():
    x, seed = torch.randn(8, 32), 2**63 + 1
    plain = dsq.quantize(x, dsq.BFP(4), rounding="stochastic", seed=seed)
    with FlopCounterMode(display=False):
        assert torch.equal(dsq.quantize(x, dsq.BFP(4), rounding="stochastic", seed=seed), plain)


def test_boxes_longer_than_any_row():
    x = torch.randn(3, 100)
    assert torch.equal(dsq.quantize(x, dsq.BFP(4, box=2**31 - 1)), dsq.quantize(x, dsq.BFP(4, box=100)))
