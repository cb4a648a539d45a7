"""The kernels compile for ARM, where there is a compiler for it. make arm runs them."""

import shutil
import subprocess

import pytest

from dsq.kernels.cpu import abi

COMPILER = shutil.which("aarch64-linux-gnu-g++")
X86 = {"attention.cpp", "avx2.cpp", "avx512.cpp", "bfloat16.cpp", "integer_avx2.cpp", "integer_avx512.cpp"}


@pytest.mark.skipif(COMPILER is None, reason="no aarch64-linux-gnu-g++")
def test_every_source_compiles():
    sources = [str(path) for path in abi.HEADER.parent.rglob("*.cpp") if path.name not in X86]
    flags = ["-std=c++17", "-Wall", "-Werror", "-DDSQ_ARM", "-march=armv8.2-a+dotprod"]
    subprocess.run([str(COMPILER), "-fsyntax-only", *flags, *sources], check=True)
