"""Tests take the first GEMM that fits, whichever is the fastest here, and leave alone what is kept about that."""

import importlib
import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

os.environ["DSQ_GEMM"] = "the first"
os.environ["DSQ_CACHE"] = tempfile.mkdtemp(prefix="dsq-tests-")
if os.environ.get("DSQ_WHOLE"):  # make test's own environment, where nothing may be missing
    pytest.importorskip = lambda name, *_, **__: importlib.import_module(name)
if "PYTEST_XDIST_WORKER" in os.environ:  # a process a core; threads of each would wait for one another
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True)
def same_random_tensors() -> None:
    """Every test draws the same random tensors, whichever tests ran before it."""
    if "torch" in sys.modules:  # the cost model's tests need none
        sys.modules["torch"].manual_seed(0)


_TRUSTED: set[object] = set()


@pytest.fixture(autouse=True)
def what_may_be_unpickled_stays() -> Iterator[None]:
    """Hugging Face's Trainer takes back what PyTorch was told to trust."""
    if "torch" in sys.modules:
        _TRUSTED.update(sys.modules["torch"].serialization.get_safe_globals())
    yield
    if "torch" in sys.modules:
        sys.modules["torch"].serialization.add_safe_globals(list(_TRUSTED))
