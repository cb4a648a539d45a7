"""The kernels compile for ARM, where there is a compiler for it. make arm runs them."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools

from dsq.kernels.cpu import abi

ROOT = Path(__file__).parents[3]
COMPILER = shutil.which("aarch64-linux-gnu-g++")


@pytest.mark.skipif(COMPILER is None, reason="no aarch64-linux-gnu-g++")
def test_every_source_compiles(monkeypatch):
    monkeypatch.setenv("_PYTHON_HOST_PLATFORM", "linux-aarch64")  # as a cross build says it
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    build = runpy.run_path(str(ROOT / "setup.py"))
    sources = [str(abi.HEADER.parent / name) for name in build["SOURCES"]]
    of_sources = {flag for flags in build["SOURCES"].values() for flag in flags}
    assert "gemm/integer_neon.cpp" in build["SOURCES"]
    command = [str(COMPILER), "-fsyntax-only", "-Wall", "-Werror", *build["FLAGS"], *of_sources, *sources]
    subprocess.run(command, check=True)
