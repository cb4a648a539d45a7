"""The passes of a linear layer: each in one call of the kernels where there is one, else step by step."""

from functools import lru_cache

import torch
from torch import Tensor

from dsq import kernels
from dsq.gemm import choose, multiply, packed
from dsq.kernels import BackwardCall, Codes, ForwardCall, NativeLayer, Products


def forward(
    products: Products, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, seed: int | None, packing: bool
) -> tuple[Tensor, Codes | None]:
    """y (..., N) of x (..., K), and x (T, K) as the backward wants it, where ``packing`` asks for it."""
    layer = kernels.backend_for(x.device).layer
    if layer is not None and kernels.plain(x, w_NK, bias_N):
        call = _forward_call(layer, products, x.dtype, x.shape, w_NK.shape, seed is not None)
        if call is not None:
            return call(x, w_NK, bias_N, seed, packing)
    x_TK = matrix(x)
    y = multiply(products.output, x_TK, w_NK, bias_N, seed)
    if x.dim() != 2:  # autograd does not let a view be changed in place that a Function gives
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w_NK.shape[0]))
    return y, packed(products.stash, x_TK, seed) if packing else None


def backward(
    products: Products, dy: Tensor, w_NK: Tensor | None, x1: Codes | Tensor | None, seed: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """dx (..., K) of dy (..., N), where ``w_NK`` is given for it, and dw (N, K), where ``x1`` is: x, packed or not."""
    layer = kernels.backend_for(dy.device).layer
    if layer is not None and not isinstance(x1, Tensor) and kernels.plain(dy, w_NK):
        w_shape, x_shape = None if w_NK is None else w_NK.shape, None if x1 is None else x1.shape
        call = _backward_call(layer, products, dy.dtype, dy.shape, w_shape, x_shape, seed is not None)
        if call is not None:
            return call(dy, w_NK, x1, seed)
    dy_TN = matrix(dy)
    dx = dw_NK = None
    if w_NK is not None:
        dx = multiply(products.input_gradient, dy_TN, w_NK, seed=seed).view(*dy.shape[:-1], w_NK.shape[1])
    if x1 is not None:
        x_TK = x1 if isinstance(x1, Codes) else matrix(x1)
        dw_NK = multiply(products.weight_gradient, dy_TN, x_TK, seed=seed)
    return dx, dw_NK


@lru_cache(maxsize=4096)
def _forward_call(
    layer: NativeLayer,
    products: Products,
    dtype: torch.dtype,
    x_shape: torch.Size,
    w_shape: torch.Size,
    stochastic: bool,
) -> ForwardCall | None:
    if dtype != torch.float32 or None in (products.output.a.grid, products.output.b.grid) or 0 in (*x_shape, *w_shape):
        return None
    return layer.forward(products, choose(products.output, dtype, "cpu"), x_shape, w_shape, stochastic)


@lru_cache(maxsize=4096)
def _backward_call(
    layer: NativeLayer,
    products: Products,
    dtype: torch.dtype,
    dy_shape: torch.Size,
    w_shape: torch.Size | None,
    x_shape: torch.Size | None,
    stochastic: bool,
) -> BackwardCall | None:
    ways = choose(products.input_gradient, dtype, "cpu"), choose(products.weight_gradient, dtype, "cpu")
    wanted = [way for way, shape in zip(ways, (w_shape, x_shape), strict=True) if shape is not None]
    if "float32" in wanted or 0 in (*dy_shape, *(w_shape or ()), *(x_shape or ())):
        return None
    return layer.backward(products, ways, dy_shape, w_shape, x_shape, stochastic)


def matrix(x: Tensor) -> Tensor:
    """(..., K) as (T, K)."""
    dims = x.dim()
    return x if dims == 2 else x.flatten(0, -2) if dims > 2 else x[None]
