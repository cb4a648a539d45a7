"""Masks of one bit a value: every backend against numpy."""

import numpy as np
import pytest
import torch

from dsq.kernels.cpu import backend as cpu
from dsq.kernels.cpu.library import library
from dsq.kernels.dispatch import apply_mask, pack_mask, relu, unpack_mask, use_backend
from dsq.kernels.reference.backend import REFERENCE
from tests.threads import threads

BACKENDS = {"reference": REFERENCE} | {isa: cpu.backend(isa) for isa in library().instruction_sets()}
EACH_BACKEND = pytest.mark.parametrize("backend", BACKENDS.values(), ids=BACKENDS)
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = [0, 1, 7, 8, 31, 32, 33, 100, 70_003]  # the last is dealt to the threads
NAN, INF = float("nan"), float("inf")


def edges(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Values on both sides of the limits and on them, subnormals, zeros of both signs, infinities and NaN."""
    tiny = torch.finfo(dtype).smallest_normal / 2
    few = torch.tensor([0.0, -0.0, tiny, -tiny, 0.1, 0.3, -0.3, 6, 5.9, INF, -INF, NAN, 1e-3], dtype=dtype)
    return few[torch.randint(len(few), (count,), generator=torch.Generator().manual_seed(count))]


@pytest.fixture(autouse=True)
def _two_threads():
    with threads(2):
        yield


@EACH_BACKEND
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0, NAN), (0.1, NAN), (-INF, 0.3), (0, 6), (-0.3, 0.1)])
@pytest.mark.parametrize("nan_is_open", [True, False])
def test_open_values_lie_between_the_limits(backend, dtype, low, high, nan_is_open):
    for count in LENGTHS:
        x = edges(count, dtype)
        wide = x.double().numpy() if dtype is torch.float64 else x.float().numpy()
        closed = (wide <= wide.dtype.type(low)) | (wide >= wide.dtype.type(high))
        open_ = np.where(np.isnan(wide), nan_is_open, ~closed)
        found = backend.pack_mask(x, low, high, nan_is_open)
        assert found.tolist() == np.packbits(open_, bitorder="little").tolist()


@EACH_BACKEND
def test_a_bool_is_its_own_mask(backend):
    for count in LENGTHS:
        flags = torch.rand(count, generator=torch.Generator().manual_seed(count)) > 0.5
        bits = backend.pack_mask(flags, 0, NAN, True)
        assert bits.tolist() == np.packbits(flags.numpy(), bitorder="little").tolist()
        assert torch.equal(backend.unpack_mask(bits, count, False, True, torch.bool), flags)


@EACH_BACKEND
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("closed", "open_"), [(0, 1), (0, 1 / 0.9), (INF, NAN), (-0.0, -3e-8)])
def test_bits_become_the_two_values(backend, dtype, closed, open_):
    for count in LENGTHS:
        bits = torch.arange((count + 7) // 8).mul(37).to(torch.uint8)
        flags = torch.from_numpy(np.unpackbits(bits.numpy(), bitorder="little", count=count).astype(bool))
        expected = torch.where(flags, torch.tensor(open_, dtype=dtype), torch.tensor(closed, dtype=dtype))
        found = backend.unpack_mask(bits, count, closed, open_, dtype)
        assert found.dtype == dtype
        assert found.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


@EACH_BACKEND
@pytest.mark.parametrize("dtype", FLOATS)
def test_values_whose_bit_is_set_are_let_through(backend, dtype):
    for count in LENGTHS:
        x, bits = edges(count, dtype), torch.arange((count + 7) // 8).mul(37).to(torch.uint8)
        flags = torch.from_numpy(np.unpackbits(bits.numpy(), bitorder="little", count=count).astype(bool))
        expected = torch.where(flags, x, torch.zeros_like(x))
        found = backend.apply_mask(bits, x)
        assert found.dtype == dtype
        assert found.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()


@pytest.mark.parametrize("isa", library().instruction_sets())
@pytest.mark.parametrize("dtype", FLOATS)
def test_relu_is_pytorchs_with_the_mask_of_its_result(isa, dtype):
    for count in LENGTHS:
        x = edges(count, dtype)
        expected = torch.relu(x)
        bits = REFERENCE.pack_mask(expected, 0.0, NAN, True)
        for in_place in (False, True):
            version = x._version
            with use_backend(cpu.backend(isa)):
                y, found = relu(x, in_place)
            assert (y is x) == in_place == (x._version > version)
            assert y.view(torch.uint8).tolist() == expected.view(torch.uint8).tolist()
            assert torch.equal(found, bits)


@pytest.mark.parametrize("isa", library().instruction_sets())
def test_subnormal_values_are_open_whatever_the_thread_has_set(isa):
    x = torch.full((64,), 2.0**-24, dtype=torch.float16)
    torch.set_flush_denormal(True)
    try:
        bits = cpu.backend(isa).pack_mask(x, 0.0, NAN, True)
    finally:
        torch.set_flush_denormal(False)
    assert bits.tolist() == [255] * 8


def test_masks_of_tensors_whose_memory_is_not_their_values():
    limits = (0.0, float("nan"), True)
    for x in (torch.randn(32, 8).t(), torch._neg_view(torch.randn(8, 32))):
        bits = pack_mask(x, *limits)
        values = torch.empty(8, 32).copy_(x)
        assert torch.equal(bits, pack_mask(values, *limits))
        assert torch.equal(apply_mask(bits, x), values.clamp(min=0))
        y, same_bits = relu(x)
        assert torch.equal(y, values.clamp(min=0))
        assert torch.equal(same_bits, bits)
    with pytest.raises(ValueError, match=r"bits must be uint8 \(33,\), got torch.uint8 \(32,\)"):
        unpack_mask(bits, 257, 0.0, 1.0, torch.float32)
    with pytest.raises(ValueError, match=r"bits must be uint8 \(33,\), got torch.uint8 \(32,\)"):
        apply_mask(bits, torch.zeros(257))
