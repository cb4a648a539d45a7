"""The passes of a linear layer: each in one call of the backend where it has one, else product by product.

Shape suffixes as in dsq.linear: T tokens, K in-features, N out-features.
"""

from functools import lru_cache
from math import prod

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dsq.kernels.backend import (
    FLOATS,
    Backend,
    BackwardCall,
    Codes,
    Dtypes,
    ForwardCall,
    LinearMatMuls,
    MatMul,
    check_codes,
)
from dsq.kernels.dispatch import backend_for, gemm_for, layout_of, plain
from dsq.ops.matmul import multiply, packed
from dsq.ops.sharing import share, shared, stash_key

_any_autocast = torch._C._is_any_autocast_enabled  # to ask for one device takes six times as long


def forward(
    matmuls: LinearMatMuls, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, seed: int | None, stashing: bool
) -> tuple[Tensor, Codes | Tensor | None]:
    """y (..., N) of x (..., K), and what of x the backward needs (T, K), where ``stashing`` asks for it.

    Under autocast operands are quantised from the tensors as they come, and y takes autocast's dtype. Layers that are
    given the same ``x`` share one stash. Raises what ``dsq.functional.linear`` promises.
    """
    autocast = autocast_dtype(x)
    _check(x, w_NK, bias_N, autocast is not None)
    dtype = autocast or x.dtype
    if not stashing:
        return _forward(matmuls, x, w_NK, bias_N, seed, dtype, packing=False)[0], None
    if matmuls.stash.format is None:
        return _forward(matmuls, x, w_NK, bias_N, seed, dtype, packing=False)[0], x.detach().to(dtype)
    if not plain(x):  # a compiler finds by itself what is packed twice, and symbols have no place in a dict
        return _forward(matmuls, x, w_NK, bias_N, seed, dtype, packing=True)
    key = stash_key(x, matmuls.stash, seed)
    stash = shared(x, key)
    y, fresh = _forward(matmuls, x, w_NK, bias_N, seed, dtype, packing=stash is None)
    if fresh is not None:
        share(x, key, fresh)
        stash = fresh
    return y, stash


def backward(
    matmuls: LinearMatMuls,
    dtypes: Dtypes,
    dy: Tensor,
    w_NK: Tensor | None,
    x1: Codes | Tensor | None,
    seed: int | None,
) -> tuple[Tensor | None, Tensor | None]:
    """dx (..., K) of dy (..., N), where ``w_NK`` is given for it, and dw (N, K), where ``x1`` is: x, packed or not."""
    if not isinstance(x1, Tensor) and plain(dy, w_NK):
        if x1 is not None and matmuls.stash.format is not None:  # saved-tensor hooks may give back anything
            check_codes(x1.codes, x1.scales, matmuls.stash.format, layout_of(x1.shape, matmuls.stash.axis))
        stored, w = (matmuls, None) if w_NK is None else _as_stored(matmuls, w_NK, seed)
        w_shape, x_shape = None if w is None else w.shape, None if x1 is None else x1.shape
        call = _backward_call(backend_for(dy.device), stored, dtypes, dy.shape, w_shape, x_shape, seed is not None)
        if call is not None:
            return call(dy, w, x1, seed)
    dy_TN = matrix(dy)
    dx = dw_NK = None
    if w_NK is not None:
        dx = multiply(matmuls.input_gradient, dy_TN, w_NK, None, seed, dtypes.x).view(*dy.shape[:-1], w_NK.shape[1])
    if x1 is not None:
        x_TK = x1 if isinstance(x1, Codes) else matrix(x1)
        dw_NK = multiply(matmuls.weight_gradient, dy_TN, x_TK, None, seed, dtypes.w)
    return dx, dw_NK


def matrix(x: Tensor) -> Tensor:
    """(..., K) as (T, K)."""
    dims = x.dim()
    return x if dims == 2 else x.flatten(0, -2) if dims > 2 else x[None]


def _forward(
    matmuls: LinearMatMuls,
    x: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    seed: int | None,
    dtype: torch.dtype,
    packing: bool,
) -> tuple[Tensor, Codes | None]:
    if plain(x, w_NK, bias_N):
        dtypes = Dtypes(x.dtype, w_NK.dtype, dtype)
        stored, w = _as_stored(matmuls, w_NK, seed)
        call = _forward_call(backend_for(x.device), stored, dtypes, x.shape, w.shape, seed is not None)
        if call is not None:
            return call(x, w, bias_N, seed, packing)
    x_TK = matrix(x)
    y = multiply(matmuls.output, x_TK, w_NK, bias_N, seed, dtype)
    if x.dim() != 2:  # autograd does not let a view be changed in place that a Function gives
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w_NK.shape[0]))
    return y, packed(matmuls.stash, x_TK, seed) if packing else None


def _as_stored(matmuls: LinearMatMuls, w_NK: Tensor, seed: int | None) -> tuple[LinearMatMuls, Tensor]:
    """A weight that lies in memory as (K, N), and the products of that: quicker than to copy it. Stochastic rounding
    draws by the place in (N, K)."""
    if seed is None and not w_NK.is_contiguous() and w_NK.t().is_contiguous():
        return matmuls.of_stored_transpose(), w_NK.t()
    return matmuls, w_NK


@lru_cache(maxsize=4096)
def _forward_call(
    backend: Backend,
    matmuls: LinearMatMuls,
    dtypes: Dtypes,
    x_shape: torch.Size,
    w_shape: torch.Size,
    stochastic: bool,
) -> ForwardCall | None:
    """One call of the backend for the forward of layers of these shapes; None where it has none."""
    matmul = matmuls.output
    if backend.linear is None or torch.float64 in dtypes or 0 in (*x_shape, *w_shape):
        return None
    if not _knows(backend, matmul) or not _knows(backend, matmuls.weight_gradient):
        return None
    sizes = matmul.sizes(torch.Size((prod(x_shape[:-1]), x_shape[-1])), w_shape)
    gemm = gemm_for(matmul, dtypes.y, sizes, backend).name
    return backend.linear.forward(matmuls, gemm, dtypes, x_shape, w_shape, stochastic)


@lru_cache(maxsize=4096)
def _backward_call(
    backend: Backend,
    matmuls: LinearMatMuls,
    dtypes: Dtypes,
    dy_shape: torch.Size,
    w_shape: torch.Size | None,
    x_shape: torch.Size | None,
    stochastic: bool,
) -> BackwardCall | None:
    """The same for the backward."""
    if backend.linear is None or torch.float64 in dtypes or 0 in (*dy_shape, *(w_shape or ()), *(x_shape or ())):
        return None
    wanted = [m for m, shape in ((matmuls.input_gradient, w_shape), (matmuls.weight_gradient, x_shape)) if shape]
    if not all(_knows(backend, matmul) for matmul in wanted):
        return None
    dy_TN = torch.Size((prod(dy_shape[:-1]), dy_shape[-1]))
    dx_gemm, dw_gemm = (
        "" if shape is None else gemm_for(matmul, dtypes.y, matmul.sizes(dy_TN, shape), backend).name
        for matmul, shape in ((matmuls.input_gradient, w_shape), (matmuls.weight_gradient, x_shape))
    )
    return backend.linear.backward(matmuls, (dx_gemm, dw_gemm), dtypes, dy_shape, w_shape, x_shape, stochastic)


def _knows(backend: Backend, matmul: MatMul) -> bool:
    """Whether both operands are packed, in formats of the backend, as the result is if it has one."""
    formats = [matmul.a.format, matmul.b.format, *([matmul.result] if matmul.result else [])]
    return all(type(format) in backend.formats for format in formats)


def forward_mode() -> bool:
    """Whether forward-mode differentiation (torch.func.jvp too) is on."""
    return forward_ad._current_level >= 0


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast asks for, if it is on; it leaves float64 alone."""
    if not _any_autocast() or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, autocast: bool) -> None:
    dtypes = FLOATS - {torch.float64} if autocast else {x.dtype}  # that may meet
    if x.dtype not in FLOATS or weight.dtype not in dtypes:
        raise TypeError(f"x and weight must share a floating dtype, got {x.dtype} and {weight.dtype}")
    if x.layout != torch.strided or weight.layout != torch.strided:
        raise TypeError(f"x and weight must be dense tensors, got ones of {x.layout} and {weight.layout}")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x and weight must be on one device, got {x.device} and {weight.device}")
    if bias is None:
        return
    if bias.dtype not in dtypes:
        raise TypeError(f"bias must have the dtype of x, {x.dtype}, got {bias.dtype}")
    if bias.shape != weight.shape[:1] or bias.device != x.device:
        raise ValueError(f"bias must be ({weight.shape[0]},) on {x.device}, got {tuple(bias.shape)} on {bias.device}")
