"""The quantized operations as functions."""

from torch import Tensor, nn

from dsq.linear import linear
from dsq.ops.products import matmul_of_activations
from dsq.precision import Precision
from dsq.quantizers import Quantized, Quantizers

__all__ = ["linear", "matmul"]


def matmul(a: Tensor, b: Tensor, at: nn.Module | Precision | str | Quantizers) -> Tensor:
    """Return ``a @ b`` of two quantized activations, with a packed stash, for modules with attention of their own.

    y = Q0(a) Q0(b), da = Q2(dy) Q1(b)^T, db = Q1(a)^T Q2(dy); blocks run along the contraction of each product.
    Differentiable once.

    Args:
        a: (..., M, K). b: (..., K, N), of the same dtype and device; leading dimensions are broadcast.
        at: a layer such as ``self.q_proj``, whose level the product follows; or four widths. Until ``dsq.convert``
            converts the layer with ``attention=True``, and if the layer evaluates in floating point, the result is
            ``a @ b``.
    Returns:
        (..., M, N), of the dtype of ``a``, or of autocast's.
    Raises:
        TypeError: an argument is no tensor, or dtypes differ without autocast. ValueError: shapes do not fit, or the
            precision is malformed.
    """
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        raise TypeError(f"a and b must be tensors, got {type(a).__name__} and {type(b).__name__}")
    if isinstance(at, nn.Module):
        if not isinstance(at, Quantized) or at.evaluates_unquantized or not at.conversion.get("attention", True):
            return a @ b
        quantizers = at.quantizers
    else:
        quantizers = Quantizers.of(at)
    return matmul_of_activations(a, b, quantizers.activation_matmuls, quantizers.seed())
