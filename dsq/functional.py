"""The quantized operations as functions."""

from torch import Tensor, nn

from dsq.linear import linear
from dsq.ops.products import product
from dsq.precision import Precision
from dsq.quantizers import Quantized, Quantizers

__all__ = ["linear", "matmul"]


def matmul(a: Tensor, b: Tensor, at: nn.Module | Precision | str | Quantizers) -> Tensor:
    """Return ``a @ b`` of two activations with both quantized and a packed stash, for modules that write attention
    themselves.

    y = Q0(a) Q0(b), da = Q2(dy) Q1(b)^T, db = Q1(a)^T Q2(dy); blocks run along the contraction of each product.
    Differentiable once.

    Args:
        a: (..., M, K). b: (..., K, N), of the same dtype and device; leading dimensions are broadcast.
        at: a layer beside it, as ``self.q_proj``, whose level it follows: plain ``a @ b`` until ``dsq.convert`` has
            converted that with ``DSQConfig(attention=True)``, and where it evaluates in floating point. Or four widths.
    Raises:
        TypeError: what is no tensor; dtypes that differ, but under autocast, whose dtype the result is in.
        ValueError: shapes that do not fit, a malformed precision.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        raise TypeError(f"a and b must be tensors, got {type(a).__name__} and {type(b).__name__}")
    if isinstance(at, nn.Module):
        if not isinstance(at, Quantized) or at.evaluates_plain or not at.conversion.get("attention", True):
            return a @ b
        quantizers = at.quantizers
    else:
        quantizers = Quantizers.of(at)
    return product(a, b, quantizers.products, quantizers.seed())
