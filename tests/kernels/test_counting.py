"""A backend from outside the package serves a device and is all that a layer calls."""

import pytest
import torch

import dsq
from dsq.kernels.conformance import affine_disagreements, cases, disagreements, mask_disagreements
from dsq.kernels.dispatch import backend_for, use_backend
from dsq.kernels.reference.backend import REFERENCE
from tests.kernels.counting import counting

CPU = torch.device("cpu")


def test_what_it_is_asked_for_is_counted_and_right():
    backend, calls = counting(backend_for(CPU))
    wrong = [case for case in list(cases(backend))[:20] if disagreements(backend, case, CPU)]
    wrong += [
        what for what, differs in (*mask_disagreements(backend, CPU), *affine_disagreements(backend, CPU)) if differs
    ]
    assert wrong == []
    kernels = ("quantize", "pack", "unpack", "pack_mask", "unpack_mask", "affine_pack", "affine_unpack")
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
