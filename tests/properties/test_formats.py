"""Formats: what packing and rounding promise of any tensor."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

import dsq
from dsq.formats import FORMATS, Format, format_class, options
from dsq.kernels.conformance import same_bits

#: formats that pack
formats = st.sampled_from(list(FORMATS)).flatmap(
    lambda name: st.builds(
        format_class(name), bits=st.integers(2, 16), **({"box": st.integers(1, 40)} if "box" in options(name) else {})
    )
)

#: every float32: subnormals, both zeros, infinities and NaN
any_float = st.floats(width=32)


def tensors() -> st.SearchStrategy[Tensor]:
    """Tensors of float32 with 1 to 3 axes."""
    shapes = arrays.array_shapes(max_dims=3, max_side=21)
    return arrays.arrays("float32", shapes, elements=any_float).map(torch.from_numpy)


seeds = st.integers(0, 2**64 - 1)
roundings = st.sampled_from(["nearest", "stochastic"])


@given(tensors(), formats, st.integers(-1, 0), roundings, seeds)
def test_unpacking_gives_the_quantised_values(x: Tensor, fmt: Format, dim: int, rounding: str, seed: int) -> None:
    assert same_bits(dsq.pack(x, fmt, dim, rounding, seed).unpack(), dsq.quantize(x, fmt, dim, rounding, seed))


@given(tensors(), formats, st.integers(-1, 0))
def test_bytes_are_those_of_the_bitstream(x: Tensor, fmt: Format, dim: int) -> None:
    packed = dsq.pack(x, fmt, dim)
    boxes = x.numel() // x.shape[dim] * math.ceil(x.shape[dim] / fmt.box) if "box" in options(fmt.name) else 1
    assert packed.scales.numel() == boxes + fmt.tensor_bytes
    rows = x.numel() // x.shape[-1]  # each begins a byte of its own
    assert 0 <= packed.codes.numel() - x.numel() * fmt.bits / 8 <= rows * 7 / 8
    assert packed.nbytes == packed.codes.numel() + packed.scales.numel()
