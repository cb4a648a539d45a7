"""The quantized linear layer and product of any shapes and widths against their equations in float64."""

import warnings
from typing import Literal

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import dsq
from dsq.functional import linear
from dsq.quantizers import Quantizers

sizes = st.integers(1, 40)
blocks = st.integers(1, 33)
precisions = st.builds(dsq.Precision, *[st.integers(2, 32)] * 4)


def agrees(got: Tensor, a: Tensor, b: Tensor) -> bool:
    """Whether ``got`` is a @ b to float32's rounding of the sums; b is (K, N)."""
    exact, largest = a.double() @ b.double(), a.double().abs() @ b.double().abs()
    return bool(((got.double() - exact).abs() <= 1e-5 * largest + 1e-30).all())


@given(
    sizes,
    sizes,
    sizes,
    precisions,
    blocks,
    st.sampled_from(["bfp", "snvint", "fixed"]),
    st.sampled_from(["exact", "float32"]),
    st.sampled_from([0, 5, 8]),
    st.booleans(),
    st.integers(0, 2**32),
)
def test_linear(
    T: int,
    K: int,
    N: int,
    precision: dsq.Precision,
    block_size: int,
    name: str,
    gemm: Literal["exact", "float32"],
    min_weight_bits: int,
    biased: bool,
    seed: int,
) -> None:
    draw = torch.Generator().manual_seed(seed)
    x, w = torch.randn(T, K, generator=draw).requires_grad_(), torch.randn(N, K, generator=draw).requires_grad_()
    b, dy = torch.randn(N, generator=draw).requires_grad_(), torch.randn(T, N, generator=draw)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, int] = {} if name == "fixed" else {"block_size": block_size}
        q: Quantizers = dsq.DSQConfig(
            [precision], format=name, gemm=gemm, min_weight_bits=min_weight_bits, **options
        ).at(0)
    y = linear(x, w, b if biased else None, q)
    y.backward(dy)

    def rounded(tensor: Tensor, fmt: dsq.formats.Format, dim: int) -> Tensor:
        return dsq.quantize(tensor.detach(), fmt, dim)

    x_and_1 = torch.cat([rounded(x, q.q0, 1), torch.ones(T, 1)], 1)
    assert agrees(y.detach(), x_and_1, torch.cat([rounded(w, q.q0, 1).T, biased * b.detach()[None]]))
    assert agrees(w.grad, rounded(dy, q.q3, 0).T, rounded(x, q.q1, 0))
    assert q.backward_weight == q.q1.at(max(precision.q1, min(precision.q0, min_weight_bits)))
    q2_dy, q_w = rounded(dy, q.q2, 1), rounded(w, q.backward_weight, 0)
    if not q.q3.quantizes:
        assert agrees(x.grad, q2_dy, q_w)
    else:  # rounded again, a sum near a tie may go either way: to the next step
        dx = rounded((q2_dy.double() @ q_w.double()).float(), q.q3, 1)
        assert (x.grad - dx).abs().max() <= 2.0 ** (2 - min(precision.q3, 20)) * 1.01 * dx.abs().max() + 1e-30
        if name in ("bfp", "fixed"):  # whose values keep their step when they are rounded once more
            assert torch.equal(rounded(x.grad, q.q3, 1), x.grad)
    if biased:
        torch.testing.assert_close(b.grad, dy.sum(0), rtol=1e-5, atol=1e-5)
