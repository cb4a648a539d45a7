"""1-bit masks against numpy's packbits, for every layout."""

import numpy as np
import pytest
import torch

from dsq.stash.saved_tensors.masks import Mask, TwoValued, one_bit


def layouts():
    x = torch.randn(6, 5, 4, 3) > 0
    return {
        "contiguous": x,
        "channels last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(1, 3),
        "square, transposed": (torch.randn(6, 6) > 0).t(),
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
    packed = one_bit(mask)
    assert torch.equal(packed.get(), mask)
    assert packed.nbytes == -(-(24 if name == "expanded" else mask.numel()) // 8)  # 6 x 1 x 4 x 1 of its values differ
    if name not in ("strided", "expanded"):
        assert packed.get().stride() == mask.stride()


def test_bits_are_in_memory_order_lowest_first():
    mask = torch.tensor([1, 0, 0, 0, 0, 0, 1, 1, 1], dtype=torch.bool)
    assert Mask.of(mask).bits.tolist() == [0b11000001, 0b1]
    square = torch.rand(4, 6).t() > 0.5
    assert (Mask.of(square).bits.numpy() == np.packbits(square.t().numpy().reshape(-1), bitorder="little")).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_dropout_noise_is_one_bit(dtype):
    noise = torch.empty(50, 7, dtype=dtype).bernoulli_(0.7).div_(0.7)
    packed = one_bit(noise)
    assert packed is not None
    assert packed.nbytes == -(-350 // 8)
    assert torch.equal(packed.get(), noise)
    assert packed.get().dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("hidden", [-torch.inf, "least", 0.0])
@pytest.mark.parametrize("first", [0, 300], ids=["from the start", "late"])
def test_what_is_added_to_scores_is_one_bit(dtype, hidden, first):
    added = torch.zeros(2, 1, 20, 20, dtype=dtype)
    added.view(-1)[first::3] = torch.finfo(dtype).min if hidden == "least" else hidden
    packed = one_bit(added)
    assert packed is not None
    assert packed.nbytes == 800 // 8
    assert torch.equal(packed.get(), added)
    assert packed.get().dtype == dtype


@pytest.mark.parametrize(
    "values",
    [
        *(torch.randn(64), torch.ones(4), torch.tensor([0.0, 1, 2, 0] * 9)),
        *(torch.cat([torch.ones(300), torch.tensor([last])]) for last in (2.0, -1.0, float("nan"))),
        torch.arange(64),
    ],
    ids=["normal", "few", "three values", "late", "late, negative", "late, NaN", "whole numbers"],
)
def test_other_tensors_are_no_mask(values):
    assert one_bit(values) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_two_values(dtype):
    x = torch.randn(5, 9, dtype=dtype)
    kept = TwoValued(Mask.of(x, 0.3), closed=6.0, open=0.1, dtype=dtype)
    assert torch.equal(kept.get(), torch.where(x > 0.3, torch.tensor(0.1, dtype=dtype), 6.0).to(dtype))
