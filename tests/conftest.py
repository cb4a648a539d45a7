"""Tests take the first GEMM that fits, whichever is the fastest here, and leave alone what is kept about that."""

import os
import sys
import tempfile

import pytest

os.environ["DSQ_GEMM"] = "the first"
os.environ["DSQ_CACHE"] = tempfile.mkdtemp(prefix="dsq-tests-")


@pytest.fixture(autouse=True)
def same_random_tensors() -> None:
    """Every test draws the same random tensors, whichever tests ran before it."""
    if "torch" in sys.modules:  # the cost model's tests need none
        sys.modules["torch"].manual_seed(0)
