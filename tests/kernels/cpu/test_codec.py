"""The compiled kernels conform on every instruction set of this machine, and stay within their memory."""

import gc
import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from dsq.formats import BFP, FixedPoint, Layout, SignedNVInt
from dsq.kernels.backend import Groups
from dsq.kernels.conformance import (
    CodecCase,
    disagreements,
    failures,
    linear_disagreements,
    mask_disagreements,
    same_bits,
)
from dsq.kernels.cpu.backend import backend
from dsq.kernels.cpu.codec import CodecKernels
from dsq.kernels.cpu.library import LIBRARY, library
from dsq.kernels.reference import codec as reference
from dsq.kernels.reference.backend import REFERENCE
from tests.threads import threads

if not LIBRARY.exists():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

CPU = torch.device("cpu")
SETS = list(library().instruction_sets())
EACH_ISA = pytest.mark.parametrize("isa", SETS)
BLOCK_FORMATS = (BFP, SignedNVInt)


@EACH_ISA
def test_the_backend_conforms(isa):
    assert list(failures(backend(isa), CPU)) == []


def flipping(operation):
    """Return the reference with the first bit of the result of ``operation`` flipped."""

    def flip_first(*args):
        result = getattr(REFERENCE, operation)(*args)
        result_bytes = (result[0] if isinstance(result, tuple) else result).view(-1).view(torch.uint8)
        result_bytes[:1] ^= 1
        return result

    return replace(REFERENCE, **{operation: flip_first})


@pytest.mark.parametrize("operation", ["pack", "quantize", "unpack", "pack_mask", "unpack_mask", "apply_mask"])
def test_the_suite_notices_one_wrong_bit(operation):
    case = CodecCase((3, 40), -1, BFP(4, 16))
    operations = [disagreements(flipping(operation), case, CPU)]
    operations += [differing for _, differing in mask_disagreements(flipping(operation), CPU)]
    assert any(operations)
    assert disagreements(REFERENCE, case, CPU) == ""


class WrongPasses:
    """Passes with a wrong last bit of bfloat16 in y, and a wrong scale in the stash."""

    def __init__(self, linear):
        self.linear, self.backward = linear, linear.backward

    def forward(self, *shapes):
        call = self.linear.forward(*shapes)

        def wrong_call(*operands):
            y, stash = call(*operands)
            stash.scales[0] += 1
            return (y.float() * (1 + 2**-7)).to(y.dtype), stash

        return wrong_call


@pytest.mark.skipif(backend(SETS[0]).linear is None, reason="no units for matmuls here")
def test_the_suite_notices_a_wrong_stash_and_a_wrong_last_bit_of_a_layer():
    cpu = backend(SETS[0])
    wrong_cpu = replace(cpu, linear=WrongPasses(cpu.linear))
    assert {tensors for _, tensors in linear_disagreements(wrong_cpu, CPU)} == {"stash y dw"}


# ---- values and shapes beyond the suite's


def assert_agrees(isa, x, fmt, dim, seed=None, out=torch.float32):
    case = CodecCase(tuple(x.shape), dim, fmt, x.dtype, out, seed)
    assert disagreements(backend(isa), case, CPU, x) == "", case


def spread_values(*shape):
    """Normal values over forty binades."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator))


@EACH_ISA
def test_one_value_that_is_not_finite_spoils_a_tensor_of_fixed_point(isa):
    for shape, value in (((300, 1100), torch.nan), ((256, 1024), -torch.inf)):  # rows apart, and as one row
        for place in (0, math.prod(shape) // 2 + 5, math.prod(shape) - 1):
            x = torch.randn(shape)
            x.view(-1)[place] = value
            for fmt in (FixedPoint(8, 4), FixedPoint(5)):
                assert_agrees(isa, x, fmt, -1)


@EACH_ISA
def test_blocks_along_rows_of_narrow_matrices_do_not_see_the_next_row(isa):
    for columns in (1, 10, 16, 32, 63, 80):
        x = spread_values(3, 50, columns)  # beyond a row's last column lies the next row
        x[1, 20, 0], x[1, 40, -1], x[2, 3, 0] = torch.nan, torch.inf, 1e38
        x[0, 16:32] = 0
        for fmt in (BFP(8), BFP(5), SignedNVInt(4)):
            for values in (x, x.nan_to_num(0, 3, 3)):
                assert_agrees(isa, values, fmt, 1)
                assert_agrees(isa, values.bfloat16(), fmt, 1, 5, torch.bfloat16)


@EACH_ISA
@pytest.mark.parametrize("count", [1, 2])
def test_threads_and_writing_past_the_caches_change_nothing(isa, count):
    kernels, x = backend(isa), spread_values(1024, 2304)  # 9 MiB
    with threads(count):
        formats, dtypes = (BFP(4), FixedPoint(11), SignedNVInt(11)), (torch.float32, torch.bfloat16)
        for dim, fmt, out in itertools.product((0, 1), formats, dtypes):
            layout = Layout.of(x.shape, dim)
            y = kernels.quantize(x, fmt, layout, None, out)
            assert same_bits(kernels.unpack(*kernels.pack(x, fmt, layout, None), fmt, layout, out)[0], y)
            if isinstance(fmt, BFP):  # in the other formats a part has another scale
                part = x[512:528].contiguous()
                expected = reference.quantize(part, fmt, Layout.of(part.shape, dim), None, out)
                assert same_bits(y[512:528], expected)


# ---- memory


@EACH_ISA
def test_memory_that_is_not_aligned_and_nothing_written_beyond_the_outputs(isa, monkeypatch):
    allocations = []

    def fenced(*shape, dtype, device):
        size, place = math.prod(shape) * dtype.itemsize, 1 if dtype is torch.uint8 else dtype.itemsize
        allocations.append((torch.full((size + 128,), 0xA5, dtype=torch.uint8, device=device), 64 + place, size))
        return allocations[-1][0][64 + place :][:size].view(dtype).view(shape)

    kernels, empty_like = backend(isa), lambda x, dtype=None: fenced(*x.shape, dtype=dtype or x.dtype, device="cpu")
    for kind, bits, shape in (
        (k, b, s) for k in BLOCK_FORMATS for b in range(2, 17) for s in ((3, 16), (2, 128), (5, 131))
    ):
        fmt, dim = kind(bits), bits % 2
        x, layout, groups = (
            spread_values(math.prod(shape) + 1)[1:].view(shape),
            Layout.of(shape, dim),
            Groups(*shape[::-1]),
        )
        expected = REFERENCE.quantize(x, fmt, layout, 5, torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", fenced)
            patch.setattr(torch, "empty_like", empty_like)
            y, packed = kernels.quantize(x, fmt, layout, 5, torch.float32), kernels.pack(x, fmt, layout, 5)
            z = kernels.unpack(*packed, fmt, layout, torch.float32).view(shape)
            affine = kernels.affine_pack(x, min(bits, 8), groups, None, None)
            kernels.affine_unpack(affine, min(bits, 8), groups, x.numel(), torch.float16)
            mask = kernels.pack_mask(x.view(-1), 0.0, math.nan, True)
            kernels.unpack_mask(mask, x.numel(), torch.bfloat16), kernels.apply_mask(mask, x), kernels.relu(x, False)
        assert same_bits(y, expected)
        assert same_bits(z, expected)
    assert len(allocations) > 1000
    for memory, place, size in allocations:
        assert (memory[:place] == 0xA5).all()
        assert (memory[place + size :] == 0xA5).all()


def test_a_descriptor_outlives_its_place_in_the_cache(monkeypatch):
    codec = CodecKernels(library(), library().instruction_sets()["portable"])
    x, layout = spread_values(20, 130), Layout.of((20, 130), 0)
    quantize = codec._c.dsq_quantize

    def evict_and_run(*arguments):
        codec.descriptor.cache_clear()
        gc.collect()
        for _ in range(100):
            library().new("CodecDesc", {"outer": 1 << 40})  # would reuse the memory of a freed descriptor
        quantize(*arguments)

    monkeypatch.setattr(codec, "_c", SimpleNamespace(dsq_quantize=evict_and_run, dsq_pack=None, dsq_unpack=None))
    y = codec.quantize(x, BFP(4), layout, None, torch.float32)
    assert same_bits(y, reference.quantize(x, BFP(4), layout, None, torch.float32))


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this CPU flushes no subnormals")
@EACH_ISA
def test_subnormals_survive_a_caller_that_flushes_them(isa):
    x = torch.randint(-(2**22), 2**22, (16, 32)) * 2.0**-149
    kernels, fmt, layout = backend(isa), BFP(4), Layout.of(x.shape, -1)
    expected = reference.quantize(x, fmt, layout, None, torch.float32)
    torch.set_flush_denormal(True)
    try:
        y = kernels.quantize(x, fmt, layout, None, torch.float32)
        bits = kernels.pack_mask(torch.full((64,), 2.0**-24, dtype=torch.float16), 0.0, math.nan, True)
    finally:
        torch.set_flush_denormal(False)
    assert expected.any()
    assert same_bits(y, expected)
    assert bits.tolist() == [255] * 8
