"""The passes of a linear layer in one call, by every instruction set and in every dtype."""

from dataclasses import replace

import pytest
import torch

import dsq
from dsq.functional import linear
from dsq.kernels.conformance import linear_disagreements
from dsq.kernels.cpu.backend import backend
from dsq.kernels.cpu.library import LIBRARY, library

if not LIBRARY.exists():
    pytest.skip("the C++ kernels are not built", allow_module_level=True)

SETS = list(library().instruction_sets())
CPU = torch.device("cpu")
needs_units = pytest.mark.skipif(backend(SETS[0]).linear is None, reason="no units for matmuls here")


@needs_units
@pytest.mark.parametrize("isa", SETS)
def test_sums_of_exact_products_rounded_once_and_the_reference_s_stash(isa):
    tried = list(linear_disagreements(backend(isa), CPU))
    assert tried
    assert [trial for trial in tried if trial[1]] == []


class WrongPasses:
    """A last bit of bfloat16 too much in y, and a wrong scale in the stash."""

    def __init__(self, linear):
        self.linear, self.backward = linear, linear.backward

    def forward(self, *shapes):
        call = self.linear.forward(*shapes)

        def wrong(*operands):
            y, stash = call(*operands)
            stash.scales[0] += 1
            return (y.float() * (1 + 2**-7)).to(y.dtype), stash

        return wrong


@needs_units
def test_a_wrong_stash_and_a_wrong_last_bit_are_noticed():
    right = backend(SETS[0])
    assert {wrong for _, wrong in linear_disagreements(replace(right, linear=WrongPasses(right.linear)), CPU)} == {
        "stash y dw"
    }


@needs_units
@pytest.mark.parametrize("levels", ["[4,4,4,16]", "[2,2,2,16]", "[16,4,4,16]", "[8,8,8,16]"])
@pytest.mark.parametrize("format", ["bfp", "sbfp", "snvint", "fixed"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
@pytest.mark.parametrize("gemm", ["integer", "bfloat16", "torch", "onednn"])
def test_a_weight_that_lies_transposed_gives_the_same_bits(levels, format, rounding, gemm, monkeypatch):
    monkeypatch.setenv("DSQ_GEMM", gemm)
    # new ones, for which no choice of another kernel is kept
    quantizers = dsq.DSQConfig(levels=levels, format=format, rounding=rounding).at(0)
    x, weight, bias = torch.randn(2, 19, 33), torch.randn(21, 33), torch.randn(21)
    found = []
    for lying in (weight, weight.t().contiguous().t()):
        torch.manual_seed(0)
        leaves = [it.detach().requires_grad_() for it in (x, lying, bias)]
        y = linear(*leaves, quantizers)
        y.square().sum().backward()
        found.append((y, *(leaf.grad for leaf in leaves)))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
