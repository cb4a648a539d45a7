"""The work and the memory of steps that are counted on a GPU that is not there."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="Inductor generates CUDA code with triton, which is not installed")
step_count = pytest.importorskip("analysis.gpu.step_count")
traced = pytest.importorskip("analysis.gpu.traced")
ROOT = Path(__file__).parents[3]

#: prints a row a design, of a GPT of three blocks of width 256
SCRIPT = """
import json
from analysis.gpu.designs import DESIGNS, Design
from analysis.gpu.estimate import _of_block
from analysis.gpu.step_count import count_step
from analysis.gpu.training import Size
size = Size(512, 512, 256, 3, 2, 64)
rows = {}
for name in ("compiled bf16", "dsq, 6 bits"):
    count = count_step(size, DESIGNS[name])
    rows[name] = _of_block(count, 3) | {"peak": count.peak_bytes, "flops": count.work.bfloat16_flops}
eager = count_step(size, Design("autocast"))
print(json.dumps(rows | {"eager": {"peak": eager.peak_bytes, "flops": eager.work.bfloat16_flops}}))
"""
TOKENS, WIDTH = 64 * 512, 256


@pytest.fixture(scope="module")
def rows():
    if shutil.which("g++") is None:
        pytest.skip("the library that stands for the GPU is built by g++, which is not installed")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT]
    process = subprocess.run(command, cwd=ROOT, env=traced.environment(), capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout)


def test_a_packed_block_saves_a_fifth_and_launches_few_kernels(rows):
    exact, packed = rows["compiled bf16"], rows["dsq, 6 bits"]
    bits = [8 * 2**20 * float(row["saved MiB of a block"]) / TOKENS / WIDTH for row in (exact, packed)]
    assert bits[0] > 260
    assert 55 < bits[1] < 65
    assert exact["launches of a block"] <= 65
    assert packed["launches of a block"] <= 80
    assert packed["peak"] < exact["peak"] < rows["eager"]["peak"]


def test_products_are_those_of_the_model(rows):
    per_token = 2 * (12 * WIDTH**2 * 3 + 512 * WIDTH)  # three blocks and the head
    assert {row["flops"] for row in rows.values()} == {3 * TOKENS * per_token}


def test_the_peak_is_the_most_that_is_alive_at_once():
    count = step_count.StepCount(traced.FakeDevice())
    with count:
        x = torch.empty(1000, device="meta")
        y = x + x  # 8,000 bytes
        z = y.view(10, 100)
        del x, y
        z = torch.empty(500, device="meta")  # 6,000 with the view
        del z
        assert count.live_bytes() == 0
    assert count.peak_bytes == 8000
    assert count.work.moved_bytes == 12000


def test_work_is_counted_in_flops_or_in_bytes():
    a, b = torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(5, 7, dtype=torch.bfloat16)
    assert traced.Work.of("mm", [a, b], []) == traced.Work(bfloat16_flops=2 * 3 * 5 * 7)
    assert traced.Work.of("addmm", [b, a.float(), b.float()], []) == traced.Work(float32_flops=2 * 3 * 5 * 7)
    q = torch.empty(2, 4, 8, 16)
    assert traced.Work.of("_scaled_dot_product_flash_attention", [q], []).attention_flops == 4 * 2 * 4 * 8 * 8 * 16 / 2
    assert traced.Work.of("add", [a, a], [a]) == traced.Work(moved_bytes=3 * 30)


def test_an_output_that_cannot_be_written_is_refused_before_the_work(monkeypatch, capsys):
    from analysis.gpu import estimate

    monkeypatch.setattr(sys, "argv", ["estimate", "--out", "/none/file.csv"])
    assert estimate.main() == 2
    assert "output /none/file.csv cannot be written: there is no folder /none" in capsys.readouterr().err
