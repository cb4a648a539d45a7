"""The passes of a linear layer in one call, by every instruction set and in every dtype."""

from dataclasses import replace

import pytest
import torch

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
