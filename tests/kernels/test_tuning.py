"""Which of the GEMMs that fit is taken: the fastest, once measured, or what the user names."""

import json
from dataclasses import replace

import pytest
import torch

import dsq
from dsq.kernels import tuning
from dsq.kernels.backend import GemmKernel
from dsq.kernels.dispatch import backend_for, gemm_for
from dsq.kernels.reference.backend import TORCH
from dsq.kernels.tuning import TimedGemm, preferred, size_class

CPU = backend_for(torch.device("cpu"))
MATMULS = dsq.Quantizers.of("[4,4,4,16]").matmuls


def gemm(name):
    return GemmKernel(name, lambda *_: True, lambda *_: torch.empty(0))


@pytest.mark.parametrize(
    ("seconds", "chosen"), [((1.0, 0.9), "b"), ((1.0, 0.97), "a"), ((1.0, 2.0), "a"), ((1.0, 0.8, 0.78), "b")]
)
def test_a_later_kernel_has_to_gain_more_than_noise(seconds, chosen):
    assert preferred([TimedGemm(gemm(name), s) for name, s in zip("abc", seconds, strict=False)]).name == chosen


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [((1, 7, 9), (1, 7, 10)), ((33, 64, 300), (40, 64, 320)), ((4096, 4096, 4096), (512, 512, 1024))],
)
def test_sizes_of_a_class(sizes, expected):
    assert size_class(sizes) == expected


def test_a_gpu_is_timed_on_larger_products():
    assert size_class((4000, 4000, 4000), "cuda") == (4096, 4096, 4096)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("DSQ_GEMM")
    monkeypatch.setenv("DSQ_CACHE", str(tmp_path))
    return tmp_path / "gemms.jsonl"


def test_the_choice_is_measured_once_and_kept(cache, monkeypatch):
    gemms, times = [gemm("slow"), gemm("fast")], iter([[2.0, 1.0]])
    monkeypatch.setattr(
        tuning, "timed", lambda gemms, *_: [TimedGemm(g, s) for g, s in zip(gemms, next(times), strict=True)]
    )
    for _ in range(2):  # a second measurement would raise StopIteration
        assert tuning.fastest(gemms, MATMULS.output, torch.float32, (128, 128, 128), CPU).name == "fast"
    assert json.loads(cache.read_text())[1] == "fast"
    for damaged in ("no JSON", "[" * 100_000):  # which json cannot read for its depth
        cache.write_text(damaged)
        with pytest.raises(StopIteration):
            tuning.fastest(gemms, MATMULS.output, torch.float32, (128, 128, 128), CPU)


def test_a_choice_for_float32_is_not_one_for_exact_products(cache):
    inexact = replace(MATMULS.output, exact=False)
    for name, matmul in (("any units", MATMULS.output), ("float32's", inexact)):
        gemms = [GemmKernel(name, TORCH.fits, TORCH.run), TORCH]
        tuning.fastest(gemms, matmul, torch.float32, (128, 128, 128), CPU)
    assert len({json.loads(line)[0] for line in cache.read_text().split("\n") if line}) == 2


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    monkeypatch.delenv("DSQ_GEMM")
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DSQ_CACHE", str(tmp_path / "file" / "below"))
    assert tuning.fastest([TORCH] * 2, MATMULS.output, torch.float32, (128, 128, 128), CPU).name == "torch"


def test_a_user_without_a_home_has_no_cache(monkeypatch):
    for name in ("DSQ_GEMM", "DSQ_CACHE", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def unknown(_):
        raise KeyError("no such user")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert tuning.fastest([TORCH] * 2, MATMULS.output, torch.float32, (128, 128, 128), CPU).name == "torch"


def test_a_relative_cache_folder_is_ignored(monkeypatch, tmp_path):
    """As the XDG Base Directory Specification asks."""
    monkeypatch.delenv("DSQ_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for given, used in ((tmp_path / "given", tmp_path / "given"), ("given", tmp_path / "home" / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(given))
        assert tuning._file() == used / "dsq" / "gemms.jsonl"


def test_processes_that_measure_at_once_take_one_choice(cache, monkeypatch):
    """Each is measuring while the other enters what it found; and one was killed while it wrote."""
    gemms = [gemm("slow"), gemm("fast")]

    def timed(*_):
        if not cache.exists():
            monkeypatch.setattr(
                tuning, "timed", lambda *_: [TimedGemm(g, s) for g, s in zip(gemms, (1, 2), strict=True)]
            )
            assert fastest().name == "slow"
            with cache.open("ab") as file:
                file.write(b'["\xff\n')
        return [TimedGemm(g, s) for g, s in zip(gemms, (2, 1), strict=True)]

    def fastest():
        return tuning.fastest(gemms, MATMULS.output, torch.float32, (128, 128, 128), CPU)

    monkeypatch.setattr(tuning, "timed", timed)
    assert [fastest().name, fastest().name] == ["slow", "slow"]
    assert len(cache.read_bytes().split(b"\n[")) == 4


def test_a_choice_is_kept_behind_a_line_that_was_cut_off(cache, monkeypatch):
    gemms = [gemm("slow"), gemm("fast")]
    monkeypatch.setattr(tuning, "timed", lambda *_: [TimedGemm(g, s) for g, s in zip(gemms, times.pop(), strict=True)])
    times = [(2, 1), (1, 2)]
    cache.write_text('["no en')
    for _ in range(2):
        assert tuning.fastest(gemms, MATMULS.output, torch.float32, (128, 128, 128), CPU).name == "slow"


def test_a_kernel_can_be_named(cache, monkeypatch):
    monkeypatch.setenv("DSQ_GEMM", "torch")
    chosen = gemm_for(MATMULS.output, torch.float32, (40, 40, 40), replace(CPU))
    assert chosen.name == "torch"
    assert not cache.exists()
