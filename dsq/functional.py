"""The quantised operations as functions."""

from dsq.linear import Quantizers, linear
from dsq.ops.explanation import Explanation, explain_linear
from dsq.precision import Precision

__all__ = ["explain", "linear"]


def explain(x_shape: tuple[int, ...], w_shape: tuple[int, int], precision: Precision | str | Quantizers) -> Explanation:
    """How ``linear`` multiplies x of ``x_shape`` (..., K) by a weight of ``w_shape`` (N, K) here, and why: the times of
    all kernels that could, for each of its three products. Raises ValueError for a malformed precision or shapes that
    do not fit.
    """
    if len(w_shape) != 2 or not x_shape or x_shape[-1] != w_shape[1]:
        raise ValueError(f"x_shape must be (..., K) and w_shape (N, K), got {x_shape} and {w_shape}")
    return explain_linear(Quantizers.of(precision).matmuls, tuple(x_shape), (w_shape[0], w_shape[1]))
