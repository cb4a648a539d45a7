"""The compiled codec gives the reference's bits, on every instruction set of this machine."""

import gc
import math

import pytest
import torch

from dsq.formats import BFP, FixedPoint, Layout, SignedBFP, SignedNVInt
from dsq.kernels.conformance import Case, cases, disagreements, same_bits
from dsq.kernels.cpu.backend import backend
from dsq.kernels.cpu.codec import SCALES, CodecKernels
from dsq.kernels.cpu.library import LIBRARY, library
from dsq.kernels.reference import codec as reference
from tests.threads import threads

if not LIBRARY.exists():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

CPU = torch.device("cpu")
OF_BOXES = pytest.mark.parametrize("kind", [BFP, SignedBFP, SignedNVInt])
EACH_ISA = pytest.mark.parametrize("isa", list(library().instruction_sets()))


def assert_agrees(isa, x, fmt, dim, seed=None, out=torch.float32):
    case = Case(tuple(x.shape), dim, fmt, x.dtype, out, seed)
    assert disagreements(backend(isa), case, CPU, x) == [], case


def wide(*shape, seed=0):
    """Normal values over forty binades."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp2(torch.randint(-20, 20, shape, generator=generator))


@EACH_ISA
def test_cases_full_of_edges(isa):
    kernels = backend(isa)
    assert [str(case) for case in cases(SCALES) if disagreements(kernels, case, CPU)] == []


@EACH_ISA
@OF_BOXES
def test_narrow_rows_with_and_without_whole_boxes(isa, kind):
    for columns in (16, 32, 48, 80, 8, 24):  # of the first four a tensor is as good as one row, of the others it is not
        for bits in (2, 3, 4, 16):
            for seed in (None, 5):
                assert_agrees(isa, wide(41, columns, seed=bits), kind(bits), -1, seed)
                assert_agrees(isa, wide(2, 19, columns, seed=bits), kind(bits), 1, seed)


@EACH_ISA
@OF_BOXES
def test_zeros_and_tiny_values_among_ordinary_ones(isa, kind):
    x = wide(48, 1100)
    x[5], x[:, 70:90], x[20:40, 300:400], x[33, 513:] = 0, 0, 1e-42, -2e-39
    for bits in (2, 4, 8, 11):
        for dim in (-1, 0):
            for seed in (None, 5):
                assert_agrees(isa, x, kind(bits), dim, seed)
                assert_agrees(isa, x, kind(bits), dim, seed, torch.bfloat16)


@EACH_ISA
@OF_BOXES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
def test_every_type_in_and_out(isa, kind, dtype, out):
    for bits in (4, 12):  # bfloat16 holds the values of one and rounds those of the other
        for dim in (0, 1):
            for seed in (None, 3):
                assert_agrees(isa, wide(33, 150).to(dtype), kind(bits), dim, seed, out)


@EACH_ISA
@OF_BOXES
def test_every_exponent(isa, kind):
    x = torch.ldexp(1 + torch.rand(254, 64), torch.arange(-126, 128).view(-1, 1)) * torch.randn(254, 64).sign()
    subnormal = torch.randint(-(2**23), 2**23, (64, 64)) * 2.0**-149
    subnormal = subnormal * torch.exp2(-torch.arange(64.0) % 24).view(-1, 1)
    for bits in (2, 8, 16):
        for dim in (0, 1):
            for seed in (None, 1):
                assert_agrees(isa, torch.cat([x, subnormal]), kind(bits), dim, seed)
    for exponent in (-127, 0, 127):
        assert_agrees(isa, x, FixedPoint(16, 14 - exponent), 1)
        assert_agrees(isa, x, FixedPoint(3, 1 - exponent), 1, seed=1)


@EACH_ISA
def test_every_exponent_of_a_tensor(isa):
    for exponent in range(-149, 128, 3):
        x = torch.ldexp(torch.randn(2, 48) * torch.tensor([1.0, 2.0**-14])[:, None], torch.tensor(exponent))
        x = x.nan_to_num(posinf=3e38, neginf=-3e38)
        for bits in (2, 5, 16):
            assert_agrees(isa, x, SignedNVInt(bits), 1, None if exponent % 2 else 7)


@EACH_ISA
def test_boxes_with_nan_or_infinity(isa):
    x = torch.randn(40, 200)
    x[3, 5], x[20, 100], x[39, 199] = torch.nan, torch.inf, -torch.inf
    x[30, 17] = torch.tensor(0x7F800001 - 2**32, dtype=torch.int64).to(torch.int32).view(torch.float32)  # signalling
    for bits in (2, 4, 5, 8, 12, 16):
        for fmt in (BFP(bits), FixedPoint(bits), FixedPoint(bits, bits - 5), SignedBFP(bits), SignedNVInt(bits)):
            for dim in (0, 1):
                for seed in (None, 9):
                    assert_agrees(isa, x, fmt, dim, seed)
                    assert_agrees(isa, x, fmt, dim, seed, torch.bfloat16)


@EACH_ISA
@pytest.mark.parametrize("shape", [(300, 1100), (256, 1024)])  # rows apart, and as one row
def test_one_nan_anywhere_spoils_a_tensor_of_static_point(isa, shape):
    x = torch.randn(shape)
    for place in (0, x.numel() // 2 + 5, x.numel() - 1):
        spoilt = x.clone()
        spoilt.view(-1)[place] = torch.nan
        for seed in (None, 4):
            assert_agrees(isa, spoilt, FixedPoint(8, 4), -1, seed)


@EACH_ISA
def test_half_values_come_out_rounded_and_beyond_its_range_infinite(isa):
    x = torch.ldexp(torch.randn(60, 64), torch.arange(-40, 20).view(-1, 1))
    for bits in (4, 16):
        assert_agrees(isa, x, BFP(bits), 1, out=torch.float16)


@EACH_ISA
@pytest.mark.parametrize("count", [1, 2])
def test_threads_and_writing_past_the_caches_change_nothing(isa, count):
    kernels, x = backend(isa), wide(1024, 2304)  # 9 MiB
    with threads(count):
        for dim in (0, 1):
            for fmt in (BFP(4), FixedPoint(11), SignedBFP(4), SignedNVInt(11)):
                for out in (torch.float32, torch.bfloat16):
                    layout = Layout.of(x.shape, dim)
                    y = kernels.quantize(x, fmt, layout, None, out)
                    assert same_bits(kernels.unpack(*kernels.pack(x, fmt, layout, None), fmt, layout, out)[0], y)
                    if isinstance(fmt, BFP | SignedBFP):  # of the others a part has another scale
                        part = x[512:528].contiguous()
                        expected = reference.quantize(part, fmt, Layout.of(part.shape, dim), None, out)
                        assert same_bits(y[512:528], expected)


@EACH_ISA
def test_memory_that_is_not_aligned(isa):
    x = wide(20 * 130 + 1)[1:].view(20, 130)
    kernels, fmt, layout = backend(isa), BFP(4), Layout.of((20, 130), 0)
    room = torch.full((20 * 130 + 2,), 7.0)
    out = room[1:-1].view(20, 130)
    kernels.quantize(x, fmt, layout, 5, torch.float32, out=out)
    assert same_bits(out, reference.quantize(x, fmt, layout, 5, torch.float32))
    assert room[0] == room[-1] == 7.0


@EACH_ISA
@OF_BOXES
def test_nothing_is_written_beyond_the_outputs(isa, kind):
    for bits in range(2, 17):
        for shape in [(3, 16), (2, 128), (5, 131)]:
            kernels, fmt, layout = backend(isa), kind(bits), Layout.of(shape, -1)
            code_shape, scale_shape = layout.code_shape(bits), fmt.scale_shape(layout)
            room = [torch.full((math.prod(s) + 64,), 0xA5, dtype=torch.uint8) for s in (code_shape, scale_shape)]
            out = tuple(r[:-64].view(s) for r, s in zip(room, (code_shape, scale_shape), strict=True))
            kernels.pack(wide(*shape), fmt, layout, None, out=out)
            assert all((r[-64:] == 0xA5).all() for r in room)


def test_a_descriptor_outlives_its_place_in_the_cache(monkeypatch):
    codec = CodecKernels(library(), library().instruction_sets()["portable"])
    x, layout = wide(20, 130), Layout.of((20, 130), 0)
    run = codec._quantize

    def evict_and_run(*arguments):
        codec.prepared.cache_clear()
        gc.collect()
        for _ in range(100):
            library().new("CodecDesc", {"outer": 1 << 40})  # would take the memory of one that was freed
        run(*arguments)

    monkeypatch.setattr(codec, "_quantize", evict_and_run)
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
    finally:
        torch.set_flush_denormal(False)
    assert expected.any()
    assert same_bits(y, expected)


@EACH_ISA
@pytest.mark.parametrize("kind", SCALES)
def test_bytes_that_no_kernel_packed(isa, kind):
    """Hooks may give back any; make sanitize runs this too."""
    for bits in (2, 4, 16):
        fmt, layout = kind(bits), Layout.of((3, 40), 1)
        codes, scales = (part.clone() for part in backend(isa).pack(torch.ones(3, 1, 40), fmt, layout, None))
        for byte in range(256):
            codes.fill_(byte), scales.fill_(byte)
            found, expected = (backend(i).unpack(codes, scales, fmt, layout, torch.float32) for i in (isa, "portable"))
            assert same_bits(found, expected), (bits, byte)
