"""dsq.stash.saved_tensors.affine against an oracle written with Python integers and floats, one value at a time."""

import math

import pytest
import torch

from dsq.kernels.backend import Groups, Running
from dsq.kernels.reference import bitstream
from dsq.stash.saved_tensors import affine


def oracle_stream(codes: list[int], bits: int) -> list[int]:
    """The codes as one little-endian integer, cut into bytes."""
    whole = sum(code << (bits * index) for index, code in enumerate(codes))
    return list(whole.to_bytes(math.ceil(len(codes) * bits / 8), "little"))


def oracle_nearest(values: list[float], bits: int, group: int) -> list[float]:
    """Round half up on the grid of each group, in double precision."""
    result = []
    for first in range(0, len(values), group):
        box = values[first : first + group]
        step = (max(box) - min(box)) / (2**bits - 1)
        result += [min(box) + step * math.floor((v - min(box)) / step + 0.5) if step else v for v in box]
    return result


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 1000])
def test_codes_pack_into_one_bit_stream_and_back(bits: int, count: int) -> None:
    codes = torch.randint(2**bits, (count,), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    stream = bitstream.pack(codes[None], bits)[0]
    assert stream.tolist() == oracle_stream(codes.tolist(), bits)
    assert torch.equal(bitstream.unpack_unsigned(stream[None], bits, count)[0], codes)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("count", [5, 64, 1000])
def test_nearest_equals_the_oracle(bits: int, count: int) -> None:
    x = torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(count))
    got = affine.pack_groups(x, bits, group=64, rounding="nearest").unpack(torch.float64)
    torch.testing.assert_close(got, torch.tensor(oracle_nearest(x.tolist(), bits, 64), dtype=torch.float64))


def test_stochastic_rounding_is_unbiased_and_stays_within_one_step() -> None:
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    mean, seeds = torch.zeros_like(x), 4000
    for seed in range(seeds):
        packed = affine.pack_groups(x, 2, group=128, seed=seed)
        back = packed.unpack()
        step = packed.ranges[1].repeat_interleave(128)[:300]
        assert ((back - x).abs() <= step * 1.0001).all()
        mean += back / seeds
    # the standard error of a mean of 4000 two-valued draws is at most step / 2 / sqrt(4000); 5 of them over 300 values
    assert ((mean - x).abs() < 5 * step / 2 / math.sqrt(seeds)).all()


def test_a_quantised_tensor_is_its_own_quantisation() -> None:
    """Assumption B3 of GACT: Q(h) = h where h = Q(h')."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3))
    once = affine.pack_groups(x, 4, seed=1).unpack()
    for seed in range(5):
        again = affine.pack_groups(once, 4, seed=seed).unpack()
        # fp32 leaves a value some 1e-6 of a step off its code: it is rounded the other way as rarely as that
        assert (again - once).abs().gt(1e-5).sum() <= 2


def test_bytes_are_the_codes_and_eight_a_group() -> None:
    for bits in range(1, 9):
        packed = affine.pack_groups(torch.randn(1000), bits, group=256)
        assert packed.nbytes == math.ceil(1000 * bits / 8) + 8 * 4


@pytest.mark.parametrize("value", [0.0, -3.25, 1e-42, 3e38])
def test_a_constant_group_comes_back_exact(value: float) -> None:
    x = torch.full((300,), value)
    assert torch.equal(affine.pack_groups(x, 4).unpack(), x)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_with_nan_or_infinity_comes_back_nan_and_no_other_does(bad: float) -> None:
    x = torch.randn(700)
    x[300] = bad
    back = affine.pack_groups(x, 4, group=256).unpack()
    assert back[256:512].isnan().all()
    assert back[:256].isfinite().all()
    assert back[512:].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_the_type_comes_back(dtype: torch.dtype) -> None:
    x = torch.linspace(-2, 2, 513).to(dtype)
    back = affine.pack_groups(x, 8).unpack(dtype)
    assert back.dtype == dtype
    assert (back.double() - x.double()).abs().max() < 4 / 255 * 1.05


def test_the_seed_decides_and_the_users_stream_is_untouched() -> None:
    x = torch.randn(5000)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, second, other = (affine.pack_groups(x, 2, seed=seed).codes for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_values_outside_the_range_given_are_clipped() -> None:
    """Mesa's running ranges lag behind the data: codes stop at 0 and 255, they do not wrap."""
    x = torch.tensor([-9.0, -1.0, 0.0, 1.0, 9.0])
    running = Running(torch.tensor([[2.0], [-1.0]]), 1.0)  # a mean that keeps all of what it was
    packed = affine.pack(x, 8, Groups(5, 1), running, seed=0)
    assert packed.codes[[0, 4]].tolist() == [0, 255]
    torch.testing.assert_close(packed.unpack(), torch.tensor([-1.0, -1.0, 0.0, 1.0, 1.0]), atol=2 / 255, rtol=0)
