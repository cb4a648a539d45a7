"""The Triton kernels: on a GPU where there is one, else through Triton's interpreter; and compiled for sm_90."""

import csv
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dsq.formats import BFP, FixedPoint, Layout, SignedBFP, SignedNVInt
from dsq.kernels.backend import Codes, MatMul, Operand
from dsq.kernels.conformance import Case, disagreements, mask_disagreements
from dsq.kernels.reference.backend import REFERENCE
from dsq.kernels.triton import codec, gemm

pytest.importorskip("triton", reason="the GPU backend needs triton, which is not installed")
ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")


def check(*parts, out):
    """What ``analysis.gpu.check`` prints of ``parts``; it agrees with the reference."""
    # a process of its own: Triton reads TRITON_INTERPRET once, when it is imported
    command = [sys.executable, "-m", "analysis.gpu.check", "--out", str(out)]
    command += [word for part in parts for word in ("--part", part)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_case_agrees_with_the_reference_and_a_step_runs(tmp_path):
    printed = check("agreement", "steps", out=tmp_path)
    with open(tmp_path / "gpu_agreement.csv") as file:
        rows = list(csv.DictReader(file))
    assert [row for row in rows if row["disagree"]] == []
    for kind in (" bfp:", " sbfp:", " snvint:", " fixed:", "product ", "mask ", "64-bit offsets: "):
        assert sum(kind in row["case"] for row in rows) > 5, kind
    assert "steps: 3 rows" in printed or torch.cuda.is_available()
    assert torch.cuda.is_available() or {row["machine"] for row in rows} == {
        "not run on a GPU (Triton's interpreter on the CPU)"
    }


@pytest.mark.soak
def test_every_part_runs(tmp_path):
    printed = check("products", "compiled", "bandwidth", out=tmp_path)
    assert all(f"{part}: " in printed for part in ("products", "compiled", "bandwidth"))


def flipping(operation):
    """The reference, but for the first bit of what ``operation`` gives."""

    def flip_first(*args):
        result = getattr(REFERENCE, operation)(*args)
        first = (result[0] if isinstance(result, tuple) else result).view(-1).view(torch.uint8)
        first[:1] ^= 1
        return result

    return replace(REFERENCE, **{operation: flip_first})


@pytest.mark.parametrize("operation", ["pack", "quantize", "unpack"])
def test_one_wrong_bit_is_a_disagreement(operation):
    case = Case((3, 40), -1, BFP(4, 16))
    assert disagreements(REFERENCE, case, CPU) == []
    assert disagreements(flipping(operation), case, CPU) != []


@pytest.mark.parametrize("operation", ["pack_mask", "unpack_mask", "apply_mask"])
def test_one_wrong_bit_of_a_mask_is_a_disagreement(operation):
    assert not any(wrong for _, wrong in mask_disagreements(REFERENCE, CPU))
    assert any(wrong for _, wrong in mask_disagreements(flipping(operation), CPU))


@pytest.fixture(scope="module")
def compiled():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: Triton compiles nothing")
    from tests.kernels.triton.compiled import compiling

    def compile_one(launch):
        with compiling() as kernels:
            launch()
        return kernels[-1]

    return compile_one


@pytest.mark.parametrize("dim", [-1, 0], ids=["columns", "rows"])
@pytest.mark.parametrize(
    ("fmt", "dtype"), [(BFP(4), torch.float32), (BFP(4), torch.bfloat16), (SignedNVInt(4), torch.float32)]
)
def test_compiled_kernels_use_wide_accesses_and_neither_spill_nor_flush(compiled, dim, fmt, dtype):
    x = torch.empty(1024, 512, dtype=dtype)
    layout = Layout.of(x.shape, dim)
    codes = torch.empty(layout.code_shape(4), dtype=torch.uint8)
    scales = torch.empty(fmt.scale_shape(layout), dtype=torch.uint8)
    pack = compiled(lambda: codec.pack(x, fmt, layout, None))
    unpack = compiled(lambda: codec.unpack(codes, scales, fmt, layout, dtype))
    stochastic = compiled(lambda: codec.quantize(x, fmt, layout, 1, dtype))
    for kernel in (pack, unpack, stochastic):
        assert (kernel.load_bytes, kernel.store_bytes, kernel.spilled_bytes) == (16, 16, 0)
        assert not kernel.flushes


@pytest.mark.parametrize("fmt", [SignedBFP(4), FixedPoint(4)])
def test_compiled_products_of_codes_use_tensor_cores_without_spills(compiled, fmt):
    layout = Layout.of((1024, 512), 1)
    codes, scales = (torch.empty(s, dtype=torch.uint8) for s in (layout.code_shape(4), fmt.scale_shape(layout)))
    x, matmul = Codes(codes, scales, torch.Size((1024, 512))), MatMul(Operand(fmt, 1), Operand(fmt, 1, transposed=True))
    kernel = compiled(lambda: gemm.GEMMS[3].run(matmul, x, x, None))
    assert kernel.kernel == "multiply"
    assert kernel.matrix_products > 0
    assert (kernel.load_bytes, kernel.spilled_bytes) == (16, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_masks_use_wide_accesses(compiled, dtype):
    x, bits = torch.empty(1 << 19, dtype=dtype), torch.empty(1 << 16, dtype=torch.uint8)
    pack = compiled(lambda: codec.pack_mask(x, 0.0, float("nan"), True))
    unpack = compiled(lambda: codec.unpack_mask(bits, len(x), 0.0, 1.0, dtype))
    apply = compiled(lambda: codec.apply_mask(bits, x))
    assert (pack.load_bytes, unpack.store_bytes, apply.load_bytes, apply.store_bytes) == (16, 16, 16, 16)
    assert pack.spilled_bytes == unpack.spilled_bytes == apply.spilled_bytes == 0
    assert not pack.flushes
    assert not unpack.flushes


@pytest.mark.parametrize(
    "shape, dim, fmt",
    [
        ((3, 19, 77), 1, BFP(5, 12)),
        ((3, 19, 77), 2, FixedPoint(16)),
        ((40, 33), 0, BFP(3, 8)),
    ],
)
def test_the_untuned_kernels_compile_without_spills(compiled, shape, dim, fmt):
    layout = Layout.of(shape, dim)
    kernel = compiled(lambda: codec.pack(torch.empty(shape), fmt, layout, 7))
    assert kernel.kernel == "encode"
    assert kernel.spilled_bytes == 0


def test_importing_dsq_does_not_import_triton():
    code = "import sys, dsq; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=False).returncode == 0
