"""The quantised operations as functions, and which kernel multiplies here."""

from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

from dsq.command.table import table
from dsq.kernels.dispatch import backend_for, gemm_for
from dsq.kernels.tuning import size_class, timed
from dsq.linear import linear
from dsq.ops.products import product
from dsq.precision import Precision
from dsq.quantizers import Quantised, Quantizers

__all__ = ["explain", "linear", "matmul"]


def matmul(a: Tensor, b: Tensor, at: nn.Module | Precision | str | Quantizers) -> Tensor:
    """``a @ b`` of two activations with both quantised and a packed stash, for modules that write attention themselves.

    y = Q0(a) Q0(b), da = Q2(dy) Q1(b)^T, db = Q1(a)^T Q2(dy); boxes run along the contraction of each product.
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
        if not isinstance(at, Quantised) or at.evaluates_plain or not at.conversion.get("attention", True):
            return a @ b
        quantizers = at.quantizers
    else:
        quantizers = Quantizers.of(at)
    return product(a, b, quantizers.products, quantizers.seed())


@dataclass(frozen=True)
class ProductChoice:
    """One product of a layer: the kernel that multiplies it, and the microseconds of all that could."""

    product: str  #: y, dx or dw
    sizes: tuple[int, int, int]  #: rows, columns, depth
    timed_sizes: tuple[int, int, int]  #: the sizes that stand for them
    kernel: str
    microseconds: dict[str, float]  #: by kernel, operands quantised or packed on the way


@dataclass(frozen=True)
class Explanation:
    """The three products of a layer; ``print`` shows a table."""

    backend: str
    products: tuple[ProductChoice, ...]

    def __str__(self) -> str:
        rows = [
            {"product": p.product, "sizes": "x".join(map(str, p.sizes)), "kernel": p.kernel}
            | {f"{name}, us": us for name, us in p.microseconds.items()}
            for p in self.products
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        return f"{self.backend}\n{table(rows, {name: '.0f' if name.endswith('us') else '' for name in names})}"


def explain(x_shape: tuple[int, ...], w_shape: tuple[int, int], precision: Precision | str | Quantizers) -> Explanation:
    """How ``linear`` multiplies x of ``x_shape`` (..., K) by a weight of ``w_shape`` (N, K) here, and why: the times of
    all kernels that could, for each of its three products. Raises ValueError for a malformed precision or shapes that
    do not fit.
    """
    if len(w_shape) != 2 or not x_shape or x_shape[-1] != w_shape[1]:
        raise ValueError(f"x_shape must be (..., K) and w_shape (N, K), got {x_shape} and {w_shape}")
    matmuls = Quantizers.of(precision).matmuls
    backend = backend_for(torch.device("cpu"))
    tokens, (out_features, in_features) = prod(x_shape[:-1]), w_shape
    x_TK, dy_TN, w_NK = map(torch.Size, ((tokens, in_features), (tokens, out_features), w_shape))
    operands = {"y": (matmuls.output, x_TK, w_NK), "dx": (matmuls.input_gradient, dy_TN, w_NK)}
    operands["dw"] = (matmuls.weight_gradient, dy_TN, x_TK)
    choices = []
    for name, (matmul, a, b) in operands.items():
        sizes = matmul.sizes(a, b)
        fitting = [gemm for gemm in backend.gemms if gemm.fits(matmul, torch.float32)]
        times = timed(fitting, matmul, torch.float32, size_class(sizes), backend)
        chosen = gemm_for(matmul, torch.float32, sizes, backend).name
        microseconds = {trial.gemm.name: trial.seconds * 1e6 for trial in times}
        choices.append(ProductChoice(name, sizes, size_class(sizes), chosen, microseconds))
    return Explanation(backend.name, tuple(choices))
