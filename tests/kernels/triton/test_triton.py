"""The Triton kernels, on a GPU if there is one, else through Triton's interpreter; and compiled for absent GPUs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import dsq
from dsq.formats import BFP, FixedPoint, Layout, SignedNVInt
from dsq.kernels import dispatch
from dsq.kernels.backend import MatMul, Operand

pytest.importorskip("triton", reason="the GPU backend needs triton, which is not installed")
gemm = pytest.importorskip("dsq.kernels.triton.gemm")
TRITON = pytest.importorskip("dsq.kernels.triton.backend").TRITON
ROOT = Path(__file__).parents[3]


def forward(a, b):
    """Return the product of x and w, with blocks along the in-features."""
    return MatMul(Operand(a, 1), Operand(b, 1, transposed=True))


# ---- the check, which runs the kernels


def check(out, *options, fails=""):
    """Run ``analysis.gpu.check``; return the finished process, and its rows."""
    # a process of its own: Triton reads TRITON_INTERPRET once, when it is imported
    command = [sys.executable, "-m", "analysis.gpu.check", "--out", str(out), *options]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore", "DSQ_CHECK_FAILS": fails}
    process = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    rows = {
        path.stem: [row for line in path.open() if "name" in (row := json.loads(line))]
        for path in sorted(out.glob("*.jsonl"))
    }
    return process, rows


def test_every_case_agrees_with_the_reference(tmp_path):
    process, rows = check(tmp_path, "--part", "agreement", "--minutes", "30")
    cases = rows["agreement"]
    assert process.returncode == 0, process.stdout + process.stderr
    assert [row for row in cases if row.get("disagree") or "error" in row] == []
    for kind in (" bfp:", " snvint:", " fixed:", "64-bit offsets"):
        assert sum(kind in row["name"] for row in cases) > 5, kind
    assert {"a seed on the device", "masks", "bytes of bfp that no kernel packed"} <= {row["name"] for row in cases}
    assert torch.cuda.is_available() or "not run on a GPU" in process.stdout


@pytest.mark.parametrize(
    ("fails", "error"),
    [("kill", "ended the process with status -9"), ("lost", "RuntimeError: CUDA error: rehearsed in bandwidth")],
)
def test_a_trial_that_fails_ends_nothing_and_a_second_call_goes_on(tmp_path, fails, error):
    parts = "--part", "bandwidth", "--trials", "3"
    process, rows = check(tmp_path, *parts, fails=fails)
    assert process.returncode == 1
    assert [row.get("error") for row in rows["bandwidth"]] == [None, error, None]
    assert "3 rows, 1 failed" in (tmp_path / "report.md").read_text()
    second_process, second_rows = check(tmp_path, *parts)
    assert second_rows == rows
    assert "bandwidth: 3 rows\n" in second_process.stdout


def test_a_trial_that_hangs_in_two_calls_has_a_row(tmp_path, monkeypatch):
    from analysis.gpu import check

    hanging_workers = [0, 1]

    def hangs(name, out, worker, trials):
        if worker == hanging_workers[0]:
            check._append(out, name, worker, {"begun": "a trial"})
        return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)"])

    monkeypatch.setattr(check, "_workers", lambda _: 2)
    monkeypatch.setattr(check, "_started", hangs)
    for _ in range(2):
        assert check._rows(tmp_path, "agreement") == []
        assert not check._run("agreement", tmp_path, 0.2, None)
        hanging_workers.pop(0)
    (row,) = check._rows(tmp_path, "agreement")
    assert row["error"] == "was running, in two calls, when the time of its part was over"


def test_an_older_pytorch_is_named_before_anything_runs(tmp_path, monkeypatch, capsys):
    from analysis.gpu import check

    monkeypatch.setenv("TRITON_INTERPRET", "1")  # which the check sets
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu128")
    assert check.main(["--part", "compiled", "--out", str(tmp_path)]) == 0
    first_line = capsys.readouterr().out.partition("\n")[0]
    assert first_line == "PyTorch 2.11.0+cu128 is older than 2.13: no part compiled, and checkpoints will fail"
    assert check._rows(tmp_path, "compiled") == []


def test_codes_that_graphs_make_are_the_references(tmp_path):
    process, rows = check(tmp_path, "--part", "compiled", "--trials", "1")
    assert process.returncode == 0, process.stdout + process.stderr
    assert [(row["name"], row["disagree"]) for row in rows["compiled"]] == [("codes of 6 bits", "")]


def test_a_process_ends_with_the_call_that_began_it(tmp_path, monkeypatch):
    from analysis.gpu import check

    parents = iter((7, 1))
    monkeypatch.setattr(os, "getppid", lambda: next(parents))
    check._work("bandwidth", tmp_path, 0, 3)
    assert check._lines(tmp_path, "bandwidth") == []


@pytest.mark.slow
@pytest.mark.parametrize("fails", ["", "raise", "lost", "kill", "hang"])
def test_a_rehearsal_of_every_part(tmp_path, fails):
    _, rows = check(tmp_path, "--minutes", "6", "--trials", "3", fails=fails)
    ran = [name for name in rows if rows[name]]
    assert {"compiled", "agreement", "steps", "bandwidth", "products", "graphs", "batches"} <= set(ran)
    failed = {name: sum("error" in row for row in rows[name]) for name in ran}
    assert failed == {name: int(fails in ("raise", "lost", "kill") and len(rows[name]) > 1) for name in ran}
    if fails == "hang":  # a trial that hung is tried once more
        process, rows = check(tmp_path, "--minutes", "6", "--trials", "3")
        assert "not finished" not in process.stdout
        assert not any("error" in row for name in ran for row in rows[name])


# ---- the choice of a product


def test_exact_products_are_computed_in_bfloat16(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: True)
    for (a, b), dtype, name in (
        ((BFP(8), SignedNVInt(5)), torch.float32, "bfloat16"),
        ((BFP(8), SignedNVInt(5)), torch.float16, "bfloat16"),
        ((BFP(16), BFP(4)), torch.float32, "split"),  # of 15 bits in two parts
        ((BFP(4), BFP(16)), torch.float32, "torch"),
        ((BFP(4), None), torch.float32, "torch"),
    ):
        assert dispatch.gemm_for(forward(a, b), dtype, (256, 256, 256), TRITON).name == name
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda **_: False)
    assert dispatch.gemm_for(forward(BFP(8), BFP(8)), torch.float32, (256, 256, 256), TRITON).name == "torch"


def test_a_device_without_kernels_is_named_once(monkeypatch):
    monkeypatch.setattr(dispatch, "_backends", {})
    with pytest.warns(UserWarning, match="the much slower reference serves 'xpu': there are no kernels for it"):
        assert dispatch.backend_for(torch.device("xpu")).name == "reference"
    with pytest.raises(
        RuntimeError, match="no kernels for 'mps', which lacks the reference's float64: use device 'cpu'"
    ):
        dispatch.backend_for(torch.device("mps"))


@pytest.mark.parametrize("bits", range(2, 17))
def test_two_bfloat16_parts_hold_any_value_of_16_bits(bits):
    x = dsq.quantize(torch.randn(64, 64) * 2.0 ** torch.randint(-30, 30, (64, 1)), dsq.BFP(bits))
    high, low = gemm.split(x)
    assert torch.equal(high.double() + low.double(), x.double())
    assert torch.equal(low, torch.zeros_like(low)) or bits > 9


# ---- some of the kernels that .ci/gpu-compile compiles


@pytest.fixture(scope="module")
def compiled():
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("TRITON_INTERPRET is set: Triton compiles nothing")
    from analysis.gpu import compiled

    return compiled


def test_hot_kernels_use_wide_accesses_and_neither_spill_nor_flush(compiled):
    hot = [call for call in compiled.kernel_calls() if call.part == "hot"]
    calls = [call for call in hot if "bfp:bits=4" in call.what and "float32" in call.what][:6]
    calls += [call for call in hot if call.what.startswith("pack mask")][:1]
    rows = list(compiled.compiled_rows("sm_90", calls))
    assert compiled.faults(rows) == []
    codecs = [row for row in rows if row["kernel"] in ("encode", "decode", "pack_mask")]
    assert len(codecs) > 6
    assert {row["load"] for row in codecs} == {16}
    assert {row["store"] for row in codecs if row["kernel"] != "pack_mask"} == {16}


@pytest.mark.parametrize("target", ["sm_75", "gfx942"])
def test_variants_that_passed_the_interpreter_and_failed_to_compile(compiled, target):
    """Offsets of 64 bits along rows; one column; blocks of more rows than a warp has."""
    x = torch.empty(1 << 20, 1 << 11, dtype=torch.bfloat16, device="meta"), torch.empty(64, 1, device="meta")
    launches = [
        compiled.KernelCall("wide", lambda: TRITON.pack(x[0], BFP(4), Layout.of(x[0].shape, 0), None)),
        compiled.KernelCall("one column", lambda: TRITON.pack(x[1], FixedPoint(4), Layout.of((64, 1), 0), 3)),
        compiled.KernelCall("long blocks", lambda: TRITON.pack(x[1], BFP(5, 128), Layout.of((64, 1), 0), None)),
    ]
    rows = list(compiled.compiled_rows(target, launches))
    assert compiled.faults(rows) == []
    assert len(rows) >= 4


def test_a_kernel_that_does_not_compile_or_fit_is_a_fault(compiled):
    def fails():
        raise RuntimeError("PassManager::run failed")

    (row,) = compiled.compiled_rows("sm_90", [compiled.KernelCall("one", fails)])
    large = {"target": "sm_86", "launch": "two", "kernel": "decode", "shared": 120_000, "hot": True, "spilled": 0}
    spills = {"target": "sm_90", "launch": "three", "kernel": "encode", "shared": 0, "hot": True, "spilled": 8}
    assert compiled.faults([row, large, spills]) == [
        "sm_90: one: PassManager::run failed",
        "sm_86: two: decode takes 120,000 bytes of shared memory",
        "sm_90: three: encode spills 8 bytes",
    ]
