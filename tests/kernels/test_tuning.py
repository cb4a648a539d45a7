"""The choice among the GEMMs that fit: the fastest, measured once, or the one that the user names."""

import json
import os
from dataclasses import replace

import pytest
import torch

import dsq
from dsq.kernels import tuning
from dsq.kernels.backend import GemmKernel
from dsq.kernels.dispatch import backend_for, gemm_for
from dsq.kernels.reference.backend import TORCH
from dsq.kernels.tuning import preferred, size_class

CPU = backend_for(torch.device("cpu"))
MATMULS = dsq.Quantizers.of("[4,4,4,16]").linear_matmuls


def gemm(name):
    return GemmKernel(name, lambda *_: True, lambda *_: torch.empty(0))


SLOW, FAST = gemm("slow"), gemm("fast")


def fastest(*gemms, matmul=MATMULS.output):
    return tuning.fastest(gemms, matmul, torch.float32, (128, 128, 128), CPU).name


def set_times(monkeypatch, *measurements):
    """Let kernels take these seconds, a tuple per measurement. A further measurement raises StopIteration."""
    times = iter(measurements)
    monkeypatch.setattr(tuning, "timed", lambda *_: next(times))


@pytest.mark.parametrize(
    ("seconds", "name"), [((1.0, 0.9), "b"), ((1.0, 0.97), "a"), ((1.0, 2.0), "a"), ((1.0, 0.8, 0.78), "b")]
)
def test_a_later_kernel_has_to_gain_more_than_noise(seconds, name):
    assert preferred([gemm(letter) for letter in "abc"], seconds).name == name


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((1, 7, 9), (1, 7, 10)),
        ((33, 64, 300), (40, 64, 320)),
        ((4096, 4096, 4096), (512, 512, 1024)),
    ],
)
def test_sizes_of_a_class(sizes, expected):
    assert size_class(sizes) == expected


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.delenv("DSQ_GEMM")
    monkeypatch.setenv("DSQ_CACHE", str(tmp_path))
    return tmp_path / "gemms.jsonl"


def test_the_choice_is_measured_once_and_saved(cache, monkeypatch):
    set_times(monkeypatch, (2.0, 1.0))
    for _ in range(2):
        assert fastest(SLOW, FAST) == "fast"
    assert json.loads(cache.read_text())[1] == "fast"
    for damaged in ("no JSON", "[" * 100_000, '["no en'):  # too deep for json; cut off
        set_times(monkeypatch, (1.0, 2.0))
        cache.write_text(damaged)
        for _ in range(2):
            assert fastest(SLOW, FAST) == "slow"


def test_a_choice_holds_for_one_build_of_the_kernels(cache, monkeypatch):
    set_times(monkeypatch, (2.0, 1.0), (1.0, 2.0))
    for build, name in (("a", "fast"), ("b", "slow"), ("a", "fast")):
        choice = tuning.fastest((SLOW, FAST), MATMULS.output, torch.float32, (128, 128, 128), replace(CPU, build=build))
        assert choice.name == name


def test_a_format_that_the_backend_lacks_is_timed_by_the_reference(cache):
    lacking = replace(CPU, formats=frozenset(), quantize=None)
    tuning.fastest((TORCH, FAST), MATMULS.output, torch.float32, (128, 128, 128), lacking)
    assert len(json.loads(cache.read_text())) == 2


def test_pytorch_multiplies_bfloat16_only_if_no_other_kernel_fits():
    for gemms in ((TORCH, FAST), (FAST, TORCH)):
        backend = replace(CPU, gemms=gemms, tuned=False)
        assert gemm_for(MATMULS.output, torch.bfloat16, (128, 128, 128), backend) is FAST


def test_a_choice_for_float32_is_not_one_for_exact_products(cache):
    for name, matmul in (("any units", MATMULS.output), ("float32's", replace(MATMULS.output, exact=False))):
        fastest(GemmKernel(name, TORCH.fits, TORCH.run), TORCH, matmul=matmul)
    assert len({json.loads(line)[0] for line in cache.read_text().split("\n") if line}) == 2


def test_a_cache_that_cannot_be_written_is_ignored(cache, monkeypatch):
    (cache.parent / "file").write_text("")
    monkeypatch.setenv("DSQ_CACHE", str(cache.parent / "file" / "below"))
    assert fastest(TORCH, TORCH) == "torch"


def test_a_cache_that_is_no_file_of_choices_is_ignored(cache, monkeypatch):
    set_times(monkeypatch, *[(2.0, 1.0)] * 3)
    os.mkfifo(cache)
    assert fastest(SLOW, FAST) == "fast"
    cache.unlink()
    cache.symlink_to("/dev/zero")
    assert fastest(SLOW, FAST) == "fast"
    cache.unlink()
    cache.write_text("")
    os.truncate(cache, 2**40)
    assert fastest(SLOW, FAST) == "fast"
    assert cache.stat().st_size == 2**40


def test_the_cache_is_in_the_users_folder_of_caches_if_there_is_one(monkeypatch, tmp_path):
    for name in ("DSQ_GEMM", "DSQ_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for variable, folder in ((tmp_path / "caches", tmp_path / "caches"), ("", tmp_path / "home" / ".cache")):
        monkeypatch.setenv("XDG_CACHE_HOME", str(variable))
        assert tuning._file() == folder / "dsq" / "gemms.jsonl"
    monkeypatch.delenv("HOME")

    def unknown(_):
        raise KeyError("no such user")

    monkeypatch.setattr("pwd.getpwuid", unknown)
    assert fastest(TORCH, TORCH) == "torch"


def test_concurrent_processes_make_one_choice(cache, monkeypatch):
    """One process measures while another saves its choice, and a third was killed while it wrote."""

    def timed(*_):
        set_times(monkeypatch, (1, 2))
        assert fastest(SLOW, FAST) == "slow"
        with cache.open("ab") as file:
            file.write(b'["\xff\n')
        return 2, 1

    monkeypatch.setattr(tuning, "timed", timed)
    assert [fastest(SLOW, FAST), fastest(SLOW, FAST)] == ["slow", "slow"]
    assert len(cache.read_bytes().split(b"\n[")) == 4


def test_a_kernel_can_be_named(cache, monkeypatch):
    monkeypatch.setenv("DSQ_GEMM", "torch")
    assert gemm_for(MATMULS.output, torch.float32, (40, 40, 40), replace(CPU)).name == "torch"
    assert not cache.exists()
