"""1-bit masks against numpy's packbits, for every layout."""

import numpy as np
import pytest
import torch

from dsq.stash.masks import Mask, PackedBool, TwoValued, scaled_mask


def layouts():
    x = torch.randn(6, 5, 4, 3) > 0
    return {
        "contiguous": x,
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(1, 3),
        "strided": x[:, ::2],
        "expanded": (torch.randn(6, 1, 4, 1) > 0).expand(6, 5, 4, 3),
        "odd length": torch.randn(13) > 0,
        "one": torch.randn(1) > 0,
        "none": torch.randn(0, 3) > 0,
        "scalar": torch.randn(()) > 0,
    }


@pytest.mark.parametrize("name", layouts())
def test_round_trip(name):
    mask = layouts()[name]
    packed = Mask.pack(mask)
    assert torch.equal(packed.unpack(), mask)
    assert packed.nbytes == -(-(24 if name == "expanded" else mask.numel()) // 8)  # 6 x 1 x 4 x 1 of its values differ
    if name not in ("strided", "expanded"):
        assert packed.unpack().stride() == mask.stride()


def test_bits_are_in_memory_order_lowest_first():
    mask = torch.tensor([1, 0, 0, 0, 0, 0, 1, 1, 1], dtype=torch.bool)
    assert Mask.pack(mask).bits.tolist() == [0b11000001, 0b1]
    square = torch.rand(4, 6).t() > 0.5
    assert (Mask.pack(square).bits.numpy() == np.packbits(square.t().numpy().reshape(-1), bitorder="little")).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dropout_noise_is_exact(dtype):
    noise = torch.empty(50, 7, dtype=dtype).bernoulli_(0.7).div_(0.7)
    packed = scaled_mask(noise)
    assert packed is not None
    assert packed.nbytes == -(-350 // 8)
    assert torch.equal(packed.get(), noise)
    assert packed.get().dtype == dtype


@pytest.mark.parametrize(
    "values",
    [
        *(torch.randn(64), torch.zeros(64), -torch.ones(64), torch.ones(4), torch.tensor([0.0, 1, 2, 0] * 9)),
        torch.cat([torch.ones(300), torch.tensor([2.0])]),
    ],
    ids=["normal", "zeros", "negative", "few", "three values", "third value late"],
)
def test_other_tensors_are_no_mask(values):
    assert scaled_mask(values) is None


def test_two_values_and_bools():
    open_ = torch.rand(5, 9) > 0.5
    kept = TwoValued(Mask.pack(open_), closed=6.0, open=3.0, dtype=torch.float32)
    assert torch.equal(kept.get(), torch.where(open_, 3.0, 6.0))
    assert torch.equal(PackedBool(Mask.pack(open_)).get(), open_)


@pytest.mark.parametrize("numel", [8, 13, 64])
def test_what_other_devices_compute_is_the_same(numel):
    """The arithmetic used off the CPU, here on the CPU: multiply to gather bits, shift to spread them."""
    from dsq.stash import masks

    flags = torch.rand(numel) > 0.5
    padded = torch.nn.functional.pad(flags.view(torch.uint8), (0, -numel % 8))
    assert torch.equal(masks.gather_bits(padded), Mask.pack(flags).bits)
    assert torch.equal(masks.spread_bits(Mask.pack(flags).bits)[:numel].bool(), flags)
