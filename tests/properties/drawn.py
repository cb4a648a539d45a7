"""Strategies that the properties draw from."""

import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from torch import Tensor

import dsq
from dsq.formats import FORMATS, format_class, options

#: formats that pack
formats = st.sampled_from([name for name in FORMATS if name != "float"]).flatmap(
    lambda name: st.builds(
        format_class(name),
        bits=st.integers(2, 16),
        **({"box": st.integers(1, 40)} if "box" in options(name) else {}),
    )
)

#: every float32: subnormals, both zeros, infinities and NaN
any_float = st.floats(width=32)
finite = st.floats(-1e6, 1e6, width=32, allow_subnormal=False)


def tensors(elements: st.SearchStrategy[float] = any_float, least: int = 1) -> st.SearchStrategy[Tensor]:
    """Tensors of float32 with 1 to 3 axes."""
    shapes = arrays.array_shapes(min_dims=1, max_dims=3, min_side=least, max_side=21)
    return arrays.arrays("float32", shapes, elements=elements).map(torch.from_numpy)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same values, NaN at the same places."""
    return (
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.equal(a.nan_to_num(7e30), b.nan_to_num(7e30))
        and torch.equal(a.isnan(), b.isnan())
    )


#: [q0,q1,q2,q3]
precisions = st.builds(dsq.Precision, *[st.integers(2, 32)] * 4)
