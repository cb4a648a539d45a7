"""A backend from outside the package serves a device, passes the conformance suite, and is all that a layer calls."""

import pytest
import torch

import dsq
from dsq.kernels.conformance import failures
from dsq.kernels.dispatch import backend_for, use_backend
from dsq.kernels.reference.backend import REFERENCE
from tests.kernels.counting import counting

CPU = torch.device("cpu")


def test_it_conforms_as_the_backend_behind_it_does():
    backend, calls = counting(backend_for(CPU))
    assert list(failures(backend, CPU)) == []
    kernels = ("quantize", "pack", "unpack", "pack_mask", "unpack_mask", "affine_pack", "affine_unpack", "torch")
    assert min(calls[kernel] for kernel in kernels) > 0


@pytest.mark.parametrize("behind", [REFERENCE, None])
def test_a_layer_calls_nothing_else(behind):
    backend, calls = counting(behind or backend_for(CPU))
    layer, x = dsq.Linear(32, 24, precision="[16,4,4,16]"), torch.randn(48, 32, requires_grad=True)
    with use_backend(backend):
        layer(x).sum().backward()
    assert sum(calls[gemm.name] for gemm in backend.gemms) == 3
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
