"""The library loads only with the header that it was built from. Its instruction sets and threads."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import setuptools

from dsq.kernels.cpu.library import HEADER, LIBRARY, is_older, library, load

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("aarch64-linux-gnu-g++")  # .ci/arm runs its output
needs_library = pytest.mark.skipif(not LIBRARY.exists(), reason="the C++ kernels are not built")


@needs_library
def test_a_library_built_from_another_header_is_refused(tmp_path):
    header, text = tmp_path / "abi.h", HEADER.read_text()
    swapped = text.replace("int32_t bits;", "int32_t swap;").replace("int32_t block;", "int32_t bits;", 1)
    for changed in (
        swapped.replace("int32_t swap;", "int32_t block;"),
        text.replace("int threads,", "int64_t threads,"),
    ):
        assert changed != text
        header.write_text(changed)
        with pytest.raises(
            RuntimeError, match=r"_native\.so is stale: .*; in a checkout, build .* build_ext --inplace"
        ):
            load(LIBRARY, header)
    header.write_text(text)
    assert load(LIBRARY, header).c.dsq_has_gemm(library().c.GEMM_TORCH)


def test_a_file_that_is_no_library_is_named(tmp_path):
    (tmp_path / "_native.so").write_bytes(b"\x7fELF")
    with pytest.raises(RuntimeError, match=r"^the C\+\+ kernels do not load: .*_native\.so.*; in a checkout, build .*"):
        load(tmp_path / "_native.so", HEADER)


def test_a_library_that_is_older_than_a_source_is_reported(tmp_path):
    library, source = tmp_path / "_native.so", tmp_path / "src" / "codec" / "bits.h"
    source.parent.mkdir(parents=True)
    for path, changed in ((library, 2000), (source, 1000)):
        path.touch()
        os.utime(path, (changed, changed))
    assert not is_older(library, tmp_path / "src")
    os.utime(source, (3000, 3000))
    assert is_older(library, tmp_path / "src")


def test_without_the_library_the_reference_serves_and_says_so_once():
    program = (
        "import pathlib, warnings, torch\n"
        "from dsq.formats import BFP\n"
        "from dsq.kernels import dispatch\n"
        "from dsq.kernels.cpu import library\n"
        "library.LIBRARY = pathlib.Path('none.so')\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always')\n"
        "    dispatch.quantize(torch.randn(3, 16), BFP(4), -1)\n"
        "    dispatch.quantize(torch.randn(3, 16), BFP(4), -1)\n"
        "assert len(said) == 1 and 'build_ext --inplace' in str(said[0].message), said\n"
        "assert dispatch.backend_for(torch.device('cpu')).name == 'reference'\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@needs_library
def test_the_threads_are_pytorchs():
    program = (
        "import torch\n"
        "from dsq.formats import BFP\n"
        "from dsq.kernels import dispatch\n"
        "torch.set_num_threads(2)\n"
        "dispatch.quantize(torch.randn(1024, 1024), BFP(4), -1); torch.randn(1024, 1024).exp()\n"
        "files = {line.split()[-1] for line in open('/proc/self/maps') if 'omp' in line.rsplit('/', 1)[-1]}\n"
        "assert len([f for f in files if '.so' in f]) <= 1, files\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.skipif(COMPILER is None, reason="no aarch64-linux-gnu-g++")
def test_every_source_compiles_for_arm(monkeypatch):
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")  # as a cross build says it
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    build = runpy.run_path(str(ROOT / "setup.py"))
    sources = [str(HEADER.parent / name) for name in build["SOURCES"]]
    of_sources = {flag for flags in build["SOURCES"].values() for flag in flags}
    assert "gemm/integer/neon.cpp" in build["SOURCES"]
    command = [str(COMPILER), "-fsyntax-only", "-Wall", "-Werror", *build["FLAGS"], *of_sources, *sources]
    subprocess.run(command, check=True)
