"""A backend from outside the package serves a device and is all that a layer calls."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

import dsq
from dsq.kernels.dispatch import backend_for, use_backend
from dsq.kernels.reference.backend import REFERENCE


@pytest.mark.parametrize("behind", [REFERENCE, backend_for(torch.device("cpu"))], ids=lambda backend: backend.name)
def test_a_layer_calls_nothing_else(behind):
    calls: Counter[str] = Counter()

    def counted(name, function):
        return lambda *args: calls.update([name]) or function(*args)

    gemms = tuple(gemm._replace(run=counted("gemm", gemm.run)) for gemm in behind.gemms)
    backend = replace(behind, name="counting", gemms=gemms, linear=None, pack=counted("pack", behind.pack))
    layer, x = dsq.Linear(32, 24, precision="[16,4,4,16]"), torch.randn(48, 32, requires_grad=True)
    with use_backend(backend):
        layer(x).sum().backward()
    assert calls["gemm"] == 3
    assert calls["pack"] >= 1


def test_the_reference_runs_no_compiled_kernel(monkeypatch):
    from dsq.kernels.cpu import library

    def refuse(*args, **kwargs):
        raise AssertionError("compiled code was asked for")

    with use_backend(REFERENCE):
        monkeypatch.setattr(library, "library", refuse)
        layer, x = dsq.Linear(32, 24, precision="[4,4,4,16]"), torch.randn(48, 32, requires_grad=True)
        layer(x).sum().backward()
        assert dsq.pack(x, dsq.BFP(4)).unpack().shape == x.shape
