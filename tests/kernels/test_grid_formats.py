"""Formats that are data, each against an implementation that is not ours (torchao, gfloat, ml_dtypes), or against a
statement in float64 where there is none. Half a million values full of edges; NaN and infinities by our own rule.
"""

import math

import numpy as np
import pytest
import torch

import dsq
from dsq.formats import NAMED, SCALE_RULES, Grid, GridFormat, Layout, integer_grid, parse_format, register_format
from dsq.kernels.conformance import CodecCase, disagreements, same_bits
from dsq.kernels.dispatch import codec_for
from dsq.kernels.reference.backend import REFERENCE

ml_dtypes = pytest.importorskip("ml_dtypes")
pytest.importorskip("torchao")

ELEMENTS = {
    "mxfp8_e4m3": torch.float8_e4m3fn,
    "mxfp8_e5m2": torch.float8_e5m2,
    "mxfp6_e2m3": "fp6_e2m3",
    "mxfp6_e3m2": "fp6_e3m2",
    "mxfp4": torch.float4_e2m1fn_x2,
}


def edges(rows: int = 512, columns: int = 1024, spread: int = 20) -> torch.Tensor:
    """Blocks of 32 over 2^±spread: ordinary values, ties, powers of two, zeros of both signs, subnormal values."""
    binades = torch.randint(-spread, spread, (rows, columns // 32)).repeat_interleave(32, 1)
    x = torch.randn(rows, columns) * torch.exp2(binades)
    x[::7] = (torch.randn_like(x[::7]) * 8).round() / 8 * torch.exp2(torch.randint(-4, 4, x[::7].shape))
    x[1::7] = torch.randn_like(x[1::7]).sign() * torch.exp2(torch.randint(-9, 9, x[1::7].shape))
    x[3, :64], x[4, :64], x[5, 33] = 0.0, -0.0, 6.0
    x[6] = torch.randn(columns) * 1e-40
    return x


X = edges()


def in_blocks(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """(rows of blocks, columns of blocks, rows, columns) as float64."""
    return x.double().unflatten(1, (-1, columns)).unflatten(0, (-1, rows)).permute(0, 2, 1, 3)


def together(blocks: torch.Tensor) -> torch.Tensor:
    return blocks.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)


# ---- OCP MX


@pytest.mark.parametrize("rule", SCALE_RULES["e8m0"])
@pytest.mark.parametrize("name", ELEMENTS)
def test_mx_has_the_bits_of_torchao(name, rule):
    from torchao.prototype.mx_formats import mx_tensor
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32 as fp4
    from torchao.prototype.mx_formats.kernels import f6_e2m3_unpacked_to_f32 as e2m3
    from torchao.prototype.mx_formats.kernels import f6_e3m2_unpacked_to_f32 as e3m2
    from torchao.prototype.mx_formats.kernels import unpack_uint4

    dtype = ELEMENTS[name]
    scales, data = mx_tensor.to_mx(X, dtype, 32, mx_tensor.ScaleCalculationMode(rule))
    if dtype == torch.float4_e2m1fn_x2:
        data = fp4(unpack_uint4(data))
    elif isinstance(dtype, str):
        data = {"fp6_e2m3": e2m3, "fp6_e3m2": e3m2}[dtype](data)
    exponents = scales.view(torch.uint8).double() - 127
    expected = data.double() * torch.exp2(exponents).repeat_interleave(32, 1)
    whole = (exponents > -126).repeat_interleave(32, 1)  # where torchao divides by the scale that it stores
    actual = dsq.quantize(X, f"{name}:{rule}")
    assert whole.float().mean() > 0.99
    assert torch.equal(actual[whole].double(), expected[whole])


@pytest.mark.parametrize("name", [*ELEMENTS, "mxint8"])
def test_mx_has_the_values_of_gfloat_to_the_ends_of_its_scale(name):
    import gfloat
    from gfloat.formats import all_block_formats

    info = next(fmt for fmt in all_block_formats if fmt.name == name + "_e2m1" * (name == "mxfp4"))
    x = torch.cat([edges(40, 128), edges(24, 128, 1) * 2.0**125, torch.randn(16, 128) * 2.0**-125])
    x = x.clamp(-3e38, 3e38)
    blocks = x.double().numpy().reshape(-1, 32)
    expected = np.array([gfloat.quantize_block(info, block, gfloat.compute_scale_amax) for block in blocks])
    expected, actual = torch.from_numpy(expected).view(x.shape), dsq.quantize(x, name).double()
    unlike = actual != expected
    if name == "mxint8":  # gfloat keeps the code -128, which is ours to leave
        unlike &= actual.abs() * 128 / 127 != expected.abs()
    assert not unlike.any()


# ---- scales with a mantissa


def test_nvfp4_is_transformer_engine_s_arithmetic():
    def float32(x):
        return np.float32(x)

    x = edges(64, 256).numpy()
    for block in ((1, 16), (16, 16)):
        top = np.abs(x).max()
        encode = float32(float32(448 * 6) / top)
        blocks = in_blocks(torch.from_numpy(x), *block).float().numpy()
        amax = np.abs(blocks).max((2, 3), keepdims=True)
        scale = (amax * (encode * float32(1 / 6))).clip(max=448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        decode = scale * (float32(1) / encode)
        with np.errstate(divide="ignore", over="ignore"):
            inverse = np.minimum(float32(1) / decode, np.finfo(np.float32).max)
            elements = (blocks * inverse).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn).astype(np.float32)
        expected = together(torch.from_numpy(elements * decode))
        actual = dsq.quantize(torch.from_numpy(x), "nvfp4" if block == (1, 16) else "nvfp4_2d")
        assert torch.equal(actual, expected)
        assert (scale == 0).any() or block != (1, 16)


def test_clamped_nvfp4_has_the_bits_of_torchao():
    from torchao.prototype.mx_formats import nvfp4_tensor as torchao
    from torchao.prototype.mx_formats.kernels import f4_unpacked_to_f32, unpack_uint4

    scale = torchao.per_tensor_amax_to_scale(X.abs().max())
    of_blocks, data = torchao.nvfp4_quantize(X, 16, scale)
    steps = (of_blocks.float() * scale).view(X.shape[0], -1).repeat_interleave(16, 1)
    expected = f4_unpacked_to_f32(unpack_uint4(data)).view(X.shape) * steps
    assert torch.equal(dsq.quantize(X, "nvfp4_clamped"), expected)
    assert not torch.equal(dsq.quantize(X, "nvfp4"), expected)


def test_deepseek_s_fp8_has_the_bits_of_torchao():
    from torchao.prototype.blockwise_fp8_training import kernels

    x = X[:, :1024].clone()
    x[6] = 0  # torchao takes no amax below 1e-12
    data, scale = kernels.torch_blockwise_scale_act_quant_lhs(x)
    assert torch.equal(dsq.quantize(x, "fp8_1x128"), data.float() * scale.repeat_interleave(128, 1))
    data, scale = kernels.torch_blockwise_scale_weight_quant(x)
    steps = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
    assert torch.equal(dsq.quantize(x, "fp8_128x128"), data.float() * steps)


@pytest.mark.parametrize("name, dtype", [("fp8", ml_dtypes.float8_e4m3fn), ("fp8_e5m2", ml_dtypes.float8_e5m2)])
@pytest.mark.parametrize("block", ["tensor", "row"])
def test_fp8_by_tensor_and_row(name, dtype, block):
    x, largest = X.numpy(), np.float32(ml_dtypes.finfo(dtype).max)
    amax = np.abs(x).max() if block == "tensor" else np.abs(x).max(1, keepdims=True)
    with np.errstate(over="ignore"):
        multiplier = np.minimum(largest / amax, np.finfo(np.float32).max)
    elements = (x * multiplier).clip(-largest, largest).astype(dtype).astype(np.float32)
    assert torch.equal(dsq.quantize(X, f"{name}_{block}"), torch.from_numpy(elements * (np.float32(1) / multiplier)))


@pytest.mark.parametrize("name, rows, columns", [("32x32", 32, 32), ("row", 1, 1024), ("tensor", 512, 1024)])
@pytest.mark.parametrize("bits", [8, 4])
def test_integers_are_near_their_statement_in_float64(bits, name, rows, columns):
    """Which knows no rounding of the scale to float32: a value that lies so near to a tie may go either way."""
    blocks = in_blocks(X, rows, columns)
    step = blocks.abs().amax((2, 3), keepdim=True) / (2 ** (bits - 1) - 1)
    t = torch.where(step == 0, 0.0, blocks / step)
    actual = in_blocks(dsq.quantize(X, f"int{bits}_{name}"), rows, columns) / torch.where(step == 0, 1.0, step)
    normal = (step > 1e-37).expand_as(t)
    assert ((actual - actual.round()).abs()[normal] < 1e-4).all()
    assert ((actual.round() - t).abs()[normal] <= 0.5 + 1e-4).all()
    assert (actual.round()[normal].abs().max() == 2 ** (bits - 1) - 1).all()


# ---- shared microexponents


@pytest.mark.parametrize("name, digits", [("mx9", 7), ("mx6", 4), ("mx4", 2)])
def test_shared_microexponents(name, digits):
    """x' = code 2^(E - d + 1 - digits), E the block's exponent, d = 1 of a pair whose own is lower (2302.08007)."""
    blocks = in_blocks(X, 1, 16)
    exponents = torch.frexp(blocks.abs()).exponent.masked_fill(blocks == 0, -200) - 1
    shared = exponents.amax(-1, keepdim=True).clamp(min=-127)
    pairs = exponents.unflatten(-1, (8, 2)).amax(-1).repeat_interleave(2, -1).clamp(min=-127)
    step = torch.exp2((shared - (pairs < shared).int() + 1 - digits).double())
    most = 2**digits - 1
    expected = together((blocks / step).round().clamp(-most, most) * step)
    assert torch.equal(dsq.quantize(X, name).double(), expected)


# ---- bfp of 17 to 32 bits


@pytest.mark.parametrize("bits", [17, 20, 32])
def test_wide_bfp_rounds_to_its_grid(bits):
    x = torch.randn(64, 64) * torch.exp2(torch.randint(-20, 20, (64, 64)))
    blocks = in_blocks(x, 1, 16)
    step = torch.exp2((torch.frexp(blocks.abs().amax(-1, keepdim=True)).exponent - 1 - (bits - 2)).double())
    most = 2.0 ** (bits - 1) - 1
    expected = together((blocks / step).round().clamp(-most, most) * step).float()
    fmt = dsq.BFP(bits)
    assert torch.equal(dsq.quantize(x, fmt), expected)
    assert not torch.equal(expected, x)
    assert torch.equal(dsq.pack(x, fmt).unpack(), expected)


# ---- of all of them


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("name", [name for name, fmt in NAMED.items() if isinstance(fmt, GridFormat)])
def test_this_machine_s_kernels_have_the_bits_of_the_reference(name, dim):
    backend = codec_for(torch.device("cpu"), NAMED[name])
    if backend is REFERENCE:
        pytest.skip("the C++ kernels were not built")
    x = X.clone()
    if "nvfp4" not in name and "tensor" not in name:  # one NaN would make all NaN
        x[9, 9], x[20, 40] = math.nan, -math.inf
    for seed in (None, 2**40 + 3):
        assert not disagreements(backend, CodecCase(X.shape, dim, NAMED[name], seed=seed), torch.device("cpu"), x)


SHAPES = (((5, 37), -1), ((5, 37), 0), ((3, 40, 33), 1), ((300,), 0), ((), 0), ((0, 16), -1), ((16, 0), 0))


@pytest.mark.parametrize("name", NAMED)
def test_packed_bits_are_the_quantized_values_in_the_format_s_own_bytes(name):
    for shape, dim in SHAPES:
        for rounding, dtype in (("nearest", torch.float32), ("stochastic", torch.bfloat16)):
            x = torch.randn(shape, dtype=dtype)
            if x.numel() > 100:
                x.view(-1)[5] = math.nan
            packed = dsq.pack(x, name, dim, rounding, 3)
            assert same_bits(packed.unpack(), dsq.quantize(x, name, dim, rounding, 3))
            assert packed.nbytes == parse_format(name).nbytes(Layout.of(shape, dim))


BITS_PER_VALUE = {"mxfp8": 8.25, "mxfp6": 6.25, "mxfp4": 4.25, "mxint8": 8.25, "mx9": 9, "mx6": 6, "mx4": 4}
BITS_PER_VALUE |= {"nvfp4": 4.5, "msfp16": 8.5, "msfp12": 4.5}


@pytest.mark.parametrize("name, bits", BITS_PER_VALUE.items())
def test_bits_a_value(name, bits):
    once = 4 if name == "nvfp4" else 0  # the scale of the tensor
    assert dsq.pack(X, name).nbytes - once == X.numel() * bits / 8


@pytest.mark.parametrize("name", NAMED)
def test_blocks_run_along_any_axis(name):
    x = torch.randn(48, 80)
    along_rows, along_columns = dsq.quantize(x, name, 0), dsq.quantize(x.t().contiguous(), name).t()
    assert torch.equal(along_rows, along_columns)
    if name.endswith(("_2d", "128x128", "32x32")):
        assert torch.equal(along_rows, dsq.quantize(x, name))


@pytest.mark.parametrize("name", [name for name, fmt in NAMED.items() if isinstance(fmt, GridFormat)])
def test_a_nan_or_an_infinity_breaks_its_block_alone(name):
    for value in (math.nan, math.inf, -math.inf):
        x = torch.randn(300, 300)
        x[0, 0] = value
        broken = dsq.quantize(x, name).isnan()
        fmt = NAMED[name]
        rows, columns = ((size or 300) for size in fmt.block) if fmt.scale != "e4m3" else (300, 300)
        assert broken[:rows, :columns].all()
        assert broken.sum() == rows * columns


def test_stochastic_rounding_is_unbiased_and_stays_on_the_grid():
    x = torch.tensor([3.3, 1.1, -0.2, 6.0]).repeat(4096, 8)
    actual = dsq.quantize(x, "mxfp4", rounding="stochastic", seed=1)
    assert torch.equal(dsq.quantize(actual, "mxfp4"), actual)
    assert torch.allclose(actual.mean(0), x.mean(0), atol=0.03)
    clipping = torch.tensor([7.5, 1.0]).repeat(4096, 16)
    aws = dsq.quantize(clipping, "mxfp4_aws", rounding="stochastic", seed=1)
    assert torch.allclose(aws.mean(0), clipping.mean(0), atol=0.1)
    assert dsq.quantize(clipping, "mxfp4", rounding="stochastic").amax() == 6


# ---- names


def test_a_format_s_text_is_its_own():
    formats = parse_format("mxfp4:even"), parse_format("int4_16x16"), dsq.FixedPoint(8), dsq.Identity(16)
    for fmt in (*NAMED.values(), *formats):
        assert parse_format(str(fmt)) == fmt
        assert " " not in str(fmt)


def test_a_user_s_own_format_is_a_line():
    fmt = GridFormat(Grid(digits=2, lowest=-1, largest=14.0), block=(1, 8))
    register_format("fp6_mine", fmt)
    try:
        assert torch.equal(dsq.quantize(X, "fp6_mine"), dsq.quantize(X, fmt))
        assert fmt.bits == 6
    finally:
        del NAMED["fp6_mine"]
    for name in ("mxfp4", "bfp4", "int4_row", "fp16", "auto", "My_own"):
        with pytest.raises(ValueError, match="name must be of lower-case letters, digits and _, and new"):
            register_format(name, fmt)
    with pytest.raises(TypeError, match="fmt must be a format"):
        register_format("mine", "mxfp4")


@pytest.mark.parametrize(
    "text, error",
    [
        ("mxpf4", "did you mean 'mxfp4'"),
        ("mxfp4:odd", "rule must be one of floor, ceil, even, rceil"),
        ("nvfp4:floor", "rule must be one of te, clamped"),
        ("grid:1,0,6.0", "format must be written as in grid:"),
        ("bfp99", "bits must be a whole number in 2..32"),
    ],
)
def test_an_unknown_name_is_one_line_with_the_nearest(text, error):
    with pytest.raises(ValueError, match=error) as caught:
        dsq.quantize(X, text)
    assert "\n" not in str(caught.value)


def test_numbers_that_make_no_grid_are_refused():
    with pytest.raises(ValueError, match="largest must be a value of the grid"):
        Grid(1, 0, 5.0)
    with pytest.raises(ValueError, match="rule must be one of floor"):
        GridFormat(integer_grid(8), rule="te")
    with pytest.raises(ValueError, match=r"block must be \(rows, columns\)"):
        GridFormat(Grid(1, 0, 6.0), block=64)
    with pytest.raises(ValueError, match="pair must divide"):
        GridFormat(integer_grid(8), (1, 15), pair=2)


def test_what_units_need_follows_from_the_grid():
    """Bits of the integers that hold all elements, as published: an int8 unit multiplies MXFP4 and E2M3 exactly."""
    published = {"mxfp8_e4m3": 19, "mxfp8_e5m2": 33, "mxfp6_e2m3": 7, "mxfp6_e3m2": 10, "mxfp4": 5, "mx9": 8, "mx6": 5}
    assert {name: NAMED[name].grid.integer_bits for name in published} == published
