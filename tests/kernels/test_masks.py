"""Masks of one bit a value: every backend against numpy. Affine codes of float64: the suite has the others."""

import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsq.kernels.backend import Groups
from dsq.kernels.conformance import same_bits
from dsq.kernels.cpu import backend as cpu
from dsq.kernels.cpu.codec import CodecKernels
from dsq.kernels.cpu.library import library
from dsq.kernels.dispatch import (
    affine_pack,
    affine_unpack,
    apply_mask,
    bernoulli,
    bernoulli_mask,
    pack_mask,
    relu,
    scale_mask,
    unpack_mask,
    use_backend,
)
from dsq.kernels.reference.backend import REFERENCE
from tests.threads import threads

BACKENDS = [cpu.backend(isa) for isa in library().instruction_sets()]
FLOATS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LENGTHS = [0, 1, 7, 8, 31, 32, 33, 100, 70_003]  # the last is dealt to the threads
NAN, INF = float("nan"), float("inf")
#: not where MKL draws, on Intel's processors
DRAWS_AS_TORCH = BACKENDS[0].bernoulli(1, 0.5, True) is not None


def edges(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return values on both sides of the limits and on them, subnormals, zeros of both signs, infinities and NaN."""
    tiny = torch.finfo(dtype).smallest_normal / 2
    values = torch.tensor([0.0, -0.0, tiny, -tiny, 0.1, 0.3, -0.3, 6, 5.9, INF, -INF, NAN, 1e-3], dtype=dtype)
    return values[torch.randint(len(values), (count,), generator=torch.Generator().manual_seed(count))]


@pytest.fixture(autouse=True, params=[REFERENCE, *BACKENDS], ids=lambda backend: backend.name)
def _each_backend(request):
    """Let each backend in turn serve the CPU, with two threads."""
    with threads(2), use_backend(request.param):
        yield


@pytest.mark.parametrize("dtype", FLOATS)
def test_open_values_lie_between_the_limits(dtype):
    limits = [(0, NAN), (0.1, NAN), (-INF, 0.3), (0, 6), (-0.3, 0.1)]
    for (low, high), nan_is_open, count in itertools.product(limits, (True, False), LENGTHS):
        x = edges(count, dtype)
        values = x.double().numpy() if dtype is torch.float64 else x.float().numpy()
        is_closed = (values <= values.dtype.type(low)) | (values >= values.dtype.type(high))
        is_open = np.where(np.isnan(values), nan_is_open, ~is_closed)
        bits = pack_mask(x, low, high, nan_is_open)
        assert bits.tolist() == np.packbits(is_open, bitorder="little").tolist()


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_become_0_and_1_and_let_values_through(dtype):
    for count in LENGTHS:
        x, bits = edges(count, dtype), torch.arange((count + 7) // 8).mul(37).to(torch.uint8)
        flags = torch.from_numpy(np.unpackbits(bits.numpy(), bitorder="little", count=count).astype(bool))
        assert same_bits(unpack_mask(bits, count, dtype), flags.to(dtype))
        assert same_bits(apply_mask(bits, x), torch.where(flags, x, torch.zeros_like(x)))


@pytest.mark.parametrize("dtype", FLOATS)
def test_relu_is_pytorchs_with_the_mask_of_its_result(dtype):
    for count, in_place in itertools.product(LENGTHS, (False, True)):
        x = edges(count, dtype)
        expected, version = torch.relu(x), x._version
        y, bits = relu(x, in_place)
        assert (y is x) == in_place == (x._version > version)
        assert same_bits(y, expected)
        assert torch.equal(bits, REFERENCE.pack_mask(expected, 0.0, NAN, True))


def test_affine_codes_of_float64_are_the_reference_s():
    x, groups = torch.randn(4, 32, dtype=torch.float64), Groups(16, 8)
    packed, expected = affine_pack(x, 4, groups), REFERENCE.affine_pack(x, 4, groups, None, None)
    assert packed.ranges.dtype == torch.float64
    assert torch.equal(packed.codes, expected.codes)
    for dtype in (torch.float64, torch.float32):
        values = affine_unpack(packed, 4, groups, 128, dtype)
        assert torch.equal(values, REFERENCE.affine_unpack(expected, 4, groups, 128, dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_scale_values_as_dropout_does(dtype):
    factor = torch.ones((), dtype=dtype).div_(0.7).item()
    for count in LENGTHS:
        x, bits = edges(count, dtype), torch.arange((count + 7) // 8).mul(37).to(torch.uint8)
        expected = unpack_mask(bits, count, dtype).div_(0.7).mul_(x)
        torch.testing.assert_close(scale_mask(bits, x, factor), expected, rtol=0, atol=0, equal_nan=True)


def test_draws_are_those_of_pytorch(request):
    for count, p in itertools.product((256, 4099, 70_003), (0.1, 0.9)):
        torch.manual_seed(count)
        expected, state = torch.empty(count).bernoulli_(p), torch.get_rng_state()
        torch.manual_seed(count)
        assert torch.equal(bernoulli((count,), p), expected.to(torch.uint8))
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(count)
        bits = bernoulli_mask(torch.empty(count), p)
        assert (bits is None) == (request.node.callspec.params["_each_backend"] is REFERENCE or not DRAWS_AS_TORCH)
        if bits is not None:
            assert torch.equal(bits, pack_mask(expected, 0.0, NAN, True))
            assert torch.equal(torch.get_rng_state(), state)
    assert bernoulli_mask(torch.empty(64, 32).t(), 0.5) is None


@pytest.mark.parametrize("isa", library().instruction_sets())
def test_the_kernel_draws_from_mt19937(isa):
    """Against NumPy's, as PyTorch draws otherwise on some processors; begun within and at the end of a state."""
    kernels = CodecKernels(library(), library().instruction_sets()[isa])
    for count, drawn, p in itertools.product((0, 1, 7, 8, 313, 5000), (0, 1, 623), (0.3, 2**-53, 1 - 2**-53)):
        torch.manual_seed(drawn)
        torch.empty(drawn, dtype=torch.int32).random_()
        header_and_words = torch.get_rng_state()[: 8 * 627].view(torch.int64).tolist()
        oracle = np.random.MT19937()
        position = header_and_words[2] if drawn else 624  # a new state has no word left
        key = np.array(header_and_words[3:], dtype=np.uint32)
        oracle.state = {"bit_generator": "MT19937", "state": {"key": key, "pos": position}}
        high, low = oracle.random_raw(2 * count).reshape(count, 2).T.astype(np.uint64)
        is_kept = ((high & np.uint64(2**21 - 1)) << np.uint64(32) | low) < np.uint64(p * 2**53)
        state = torch.get_rng_state()
        assert kernels.draw(count, p, False).tolist() == is_kept.tolist()
        torch.set_rng_state(state)
        assert kernels.draw(count, p, True).tolist() == np.packbits(is_kept, bitorder="little").tolist()
        assert torch.randint(2**20, (3,)).tolist() == [int(word) & (2**20 - 1) for word in oracle.random_raw(3)]


def test_threads_that_draw_at_once_draw_other_numbers():
    with ThreadPoolExecutor(4) as pool:
        draws = list(pool.map(lambda _: bernoulli((4096,), 0.5), range(16)))
    assert len({tuple(draw.tolist()) for draw in draws}) == 16


@pytest.mark.parametrize("context", [FakeTensorMode, lambda: torch.device("meta")], ids=["fake", "meta"])
def test_the_first_draw_may_come_under_another_mode(context):
    """The backend is loaded, and its draws are compared with PyTorch's, wherever it is first needed."""
    with context(), use_backend(cpu.backend(next(iter(library().instruction_sets())))):
        bernoulli_mask(torch.empty(512, device="cpu"), 0.5)
    with use_backend(cpu.backend(next(iter(library().instruction_sets())))):
        assert bernoulli((512,), 0.5).shape == (512,)


def test_a_child_draws_though_a_thread_drew_when_it_was_forked():
    code = """
import os, signal, threading
from dsq.kernels.cpu import codec
threading.Thread(target=codec._GENERATOR.acquire).start()
child = os.fork()
if not child:
    signal.alarm(20)
    with codec._GENERATOR:
        os._exit(0)
raise SystemExit(os.waitpid(child, 0)[1])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
