"""The registered operators, which torch.compile, modes and autograd see; direct calls past the dispatcher; and backends
that replace another."""

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import dsq
from dsq.formats import BFP, FixedPoint
from dsq.kernels import dispatch
from dsq.kernels.dispatch import backend_for, use_backend
from dsq.kernels.reference.backend import REFERENCE

FORMAT = BFP(4)
ROOT = Path(__file__).parents[2]
ops = torch.ops.dsq


@pytest.mark.parametrize("fmt", [BFP(4), FixedPoint(7), FixedPoint(3, 0)])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("seed", [None, 3])
def test_opcheck(fmt, dim, seed):
    x, text = torch.randn(20, 33), str(fmt)
    codes, scales = ops.pack(x, text, dim, seed)
    torch.library.opcheck(ops.quantize, (x, text, dim, seed, torch.bfloat16))
    torch.library.opcheck(ops.pack, (x, text, dim, seed))
    torch.library.opcheck(ops.unpack, (codes, scales, text, [20, 33], dim, torch.float32))


@pytest.mark.parametrize("shape", [(), (1,), (0, 16), (16, 0), (2, 3, 5)])
def test_a_direct_call_gives_the_result_of_the_operator(shape):
    x = torch.randn(shape)
    direct = dispatch.quantize(x, FORMAT, -1)
    codes, scales = dispatch.pack(x, FORMAT, -1)
    unpacked = dispatch.unpack(codes, scales, FORMAT, shape, -1, torch.float32)
    assert torch.equal(direct, ops.quantize(x, str(FORMAT), -1, None, torch.float32))
    assert torch.equal(codes, ops.pack(x, str(FORMAT), -1, None)[0])
    assert direct.shape == unpacked.shape == x.shape
    assert torch.equal(unpacked, direct)


@pytest.mark.parametrize("out", [torch.float64, torch.bfloat16])
def test_float64_is_rounded_to_float32_first(out):
    x = torch.randn(4, 32, dtype=torch.float64)
    x[0, 0] = 1e300  # infinite in float32
    y, narrow = dispatch.quantize(x, FORMAT, -1, 3, out), dispatch.quantize(x.float(), FORMAT, -1, 3, out)
    packed = dispatch.pack(x, FORMAT, -1, 3)
    assert y.dtype == out
    assert torch.equal(y.isnan(), narrow.isnan())
    assert torch.equal(y.nan_to_num(), narrow.nan_to_num())
    for call in (dispatch.unpack, lambda codes, scales, fmt, *args: ops.unpack(codes, scales, str(fmt), *args)):
        assert torch.equal(call(*packed, FORMAT, (4, 32), -1, out).nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("x", [torch.randn(32, 8).t(), torch._neg_view(torch.randn(8, 32))])
def test_tensors_with_another_order_or_sign_in_memory(x):
    contiguous = torch.empty(8, 32).copy_(x)
    limits = (0.0, math.nan, True)
    bits = dispatch.pack_mask(contiguous, *limits)
    for call in (
        lambda x: [dispatch.quantize(x, FORMAT, -1), *dispatch.pack(x, FORMAT, -1)],
        lambda x: [*dispatch.relu(x), dispatch.pack_mask(x, *limits), dispatch.apply_mask(bits, x)],
    ):
        assert all(map(torch.equal, call(x), call(contiguous)))


@pytest.mark.parametrize("backend", [None, REFERENCE])
def test_results_take_no_part_in_autograd(backend):
    weight = torch.nn.Parameter(torch.randn(8, 32))
    with dispatch.use_backend(backend or dispatch.backend_for(weight.device)):
        assert not dispatch.quantize(weight, FORMAT, -1).requires_grad
        assert not dispatch.quantize(weight * 2, FORMAT, -1).requires_grad


def test_codes_of_another_shape_are_refused_and_strided_ones_read():
    codes, scales = dispatch.pack(torch.randn(4, 32), FORMAT, -1)
    for arguments in [
        (codes[:3], scales),
        (codes, scales[:0]),
        (codes.float(), scales),
        (codes, scales.to(torch.int8)),
    ]:
        for unpack in (dispatch.unpack, lambda c, e, fmt, s, d, t: ops.unpack(c, e, str(fmt), s, d, t)):
            with pytest.raises(ValueError, match=r"must be uint8 of shapes \(4, 16\) and \(4, 2\), got"):
                unpack(*arguments, FORMAT, (4, 32), -1, torch.float32)
    for size in ([4, 1 << 40], [-4, 32]):
        with pytest.raises(ValueError):
            ops.unpack(codes, scales, str(FORMAT), size, -1, torch.float32)
    with pytest.raises(ValueError, match=r"codes and scales must be on one device, got cpu and meta"):
        dispatch.unpack(codes, scales.to("meta"), FORMAT, (4, 32), -1, torch.float32)
    expected = dispatch.unpack(codes, scales, FORMAT, (4, 32), -1, torch.float32)
    strided = codes.t().contiguous().t(), scales.t().contiguous().t()
    assert torch.equal(dispatch.unpack(*strided, FORMAT, (4, 32), -1, torch.float32), expected)


def test_a_checkout_on_the_path_does_not_shadow_another_package_of_the_name(tmp_path):
    """Hugging Face's package is called kernels too; a folder without __init__.py gives way to it."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("theirs = True")
    code = f"import sys; sys.path.append({str(tmp_path)!r}); import kernels; assert kernels.theirs"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("wrapped", [REFERENCE, backend_for(torch.device("cpu"))], ids=lambda backend: backend.name)
def test_a_layer_calls_only_its_backend(wrapped):
    calls: Counter[str] = Counter()

    def counted(name, function):
        return lambda *args: calls.update([name]) or function(*args)

    gemms = tuple(gemm._replace(run=counted("gemm", gemm.run)) for gemm in wrapped.gemms)
    backend = replace(wrapped, name="counting", gemms=gemms, linear=None, pack=counted("pack", wrapped.pack))
    layer, x = dsq.Linear(32, 24, precision="[16,4,4,16]"), torch.randn(48, 32, requires_grad=True)
    with use_backend(backend):
        layer(x).sum().backward()
    assert calls["gemm"] == 3
    assert calls["pack"] >= 1
