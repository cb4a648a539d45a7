"""Formats: what packing and rounding promise of any tensor."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

import dsq
from dsq.formats import BFP, FORMATS, Format, format_class, options
from dsq.kernels.conformance import same_bits

#: formats that pack
formats = st.sampled_from([name for name in FORMATS if name != "float"]).flatmap(
    lambda name: st.builds(
        format_class(name), bits=st.integers(2, 16), **({"box": st.integers(1, 40)} if "box" in options(name) else {})
    )
)

#: every float32: subnormals, both zeros, infinities and NaN
any_float = st.floats(width=32)
finite = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def tensors(elements: st.SearchStrategy[float] = any_float) -> st.SearchStrategy[Tensor]:
    """Tensors of float32 with 1 to 3 axes."""
    shapes = arrays.array_shapes(max_dims=3, max_side=21)
    return arrays.arrays("float32", shapes, elements=elements).map(torch.from_numpy)


seeds = st.integers(0, 2**64 - 1)
roundings = st.sampled_from(["nearest", "stochastic"])


@given(tensors(), formats, st.integers(-1, 0), roundings, seeds)
def test_unpacking_gives_the_quantised_values(x: Tensor, fmt: Format, dim: int, rounding: str, seed: int) -> None:
    assert same_bits(dsq.pack(x, fmt, dim, rounding, seed).unpack(), dsq.quantize(x, fmt, dim, rounding, seed))


@given(tensors(finite), st.integers(2, 16), st.integers(1, 40), roundings, seeds)
def test_no_value_moves_by_more_than_its_step(x: Tensor, bits: int, box: int, rounding: str, seed: int) -> None:
    q = dsq.quantize(x, BFP(bits, box), -1, rounding, seed).double()
    rows, width = x.double().reshape(-1, x.shape[-1]), x.shape[-1]
    for row, rounded in zip(rows, q.reshape(-1, width), strict=True):
        for start in range(0, width, box):
            values, got = row[start : start + box], rounded[start : start + box]
            largest = values.abs().max().item()
            step = 2.0 ** (math.frexp(largest)[1] - 1 - (bits - 2)) if largest else 0.0
            limit = (2 ** (bits - 1) - 1) * step  # values beyond it are clipped
            assert ((got - values.clamp(-limit, limit)).abs() <= step * (0.5 if rounding == "nearest" else 1)).all()


@given(tensors(), formats, st.integers(-1, 0))
def test_bytes_are_those_of_the_bitstream(x: Tensor, fmt: Format, dim: int) -> None:
    packed = dsq.pack(x, fmt, dim)
    boxes = x.numel() // x.shape[dim] * math.ceil(x.shape[dim] / fmt.box) if "box" in options(fmt.name) else 1
    assert packed.scales.numel() == boxes + fmt.tensor_bytes
    rows = x.numel() // x.shape[-1]  # each begins a byte of its own
    assert 0 <= packed.codes.numel() - x.numel() * fmt.bits / 8 <= rows * 7 / 8
    assert packed.nbytes == packed.codes.numel() + packed.scales.numel()
