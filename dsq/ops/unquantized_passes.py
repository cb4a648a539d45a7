"""Products that PyTorch multiplies as they are, and the passes of a linear layer of such: only x is rounded, as it is
packed.

One function a pass, as in a narrow layer the overhead of ``multiply``, which serves all products, takes longer than the
work. Shape suffixes: T tokens, K in-features, N out-features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsq.kernels.backend import DTYPES, Codes, ForwardCall, LinearMatMuls, LinearSpec
from dsq.kernels.dispatch import pack, unpack
from dsq.kernels.product_dtype import product_dtype
from dsq.kernels.reference.backend import TORCH
from dsq.ops.products import autocast_dtype, inner_dtype

#: (dy (..., N), w (N, K) or None, x or None: packed, or its values) -> dx (..., K) of w, dw (N, K) of x, or None
UnquantizedBackward = Callable[[Tensor, Tensor | None, Codes | Tensor | None], tuple[Tensor | None, Tensor | None]]


def in_product_dtype(run: Callable[..., Any], *operands: Tensor | None, dtype: torch.dtype | None = None) -> Any:
    """Return ``run(*operands)``, a tensor or several, multiplied in the ``product_dtype`` of ``dtype`` (default: that
    of autocast, or of the operands) and rounded to ``dtype``."""
    present = [x for x in operands if x is not None]
    if present[0].device.type != "cpu" or not all(x.dtype in DTYPES for x in present):
        return run(*operands)
    autocast = autocast_dtype(present[0])
    dtype = dtype or autocast or present[0].dtype
    inner = product_dtype(dtype, "cpu")
    if inner is dtype or (autocast is None and any(x.dtype != dtype for x in present)):  # which PyTorch refuses
        return run(*operands)
    with torch._C._DisableAutocast():
        results = run(*(None if x is None else x.to(dtype).to(inner) for x in operands))
    if isinstance(results, Tensor):
        return results.to(dtype)
    return [None if x is None else x.to(dtype) for x in results]


def leaves_products(matmuls: LinearMatMuls) -> bool:
    """Return whether the three products are PyTorch's, and x is packed as it is."""
    output, dx, dw = matmuls
    quantized = any(x.format is not None or x.transforms for x in (output.a, output.b, dx.a, dx.b, dw.a))
    results = any(matmul.result is not None for matmul in matmuls)
    return not quantized and not results and dw.b.packs and not dw.b.transforms


def forward_call(spec: LinearSpec) -> ForwardCall:
    """Return the forward of ``spec``."""
    matmul, operand, x_shape_TK = spec.matmuls.output, spec.matmuls.x_for_dw, spec.x_shape_TK
    fmt = operand.quantized_to
    inner = inner_dtype(matmul, spec.dtypes.x, spec.dtypes.y)

    def call(
        x: Tensor, w_NK: Tensor, bias_N: Tensor | None, seed: int | None, packing: bool
    ) -> tuple[Tensor, Codes | None]:
        x_TK = x.reshape(*x_shape_TK)
        a, b = x_TK.to(inner), w_NK.to(inner).mT
        with torch._C._DisableAutocast():
            y = TORCH.run(matmul, a, b, None if bias_N is None else bias_N.to(inner))
        del a, b  # before codes are allocated
        y = y.to(spec.dtypes.y)
        if x.dim() != 2:  # autograd does not let a view be changed in place that a Function gives
            y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w_NK.shape[0]))
        if not packing:
            return y, None
        return y, Codes(*pack(x_TK, fmt, operand.axis, operand.seed_of(seed)), x_shape_TK)

    return call


def backward_call(spec: LinearSpec) -> UnquantizedBackward:
    """Return the backward of ``spec``."""
    _, dx_matmul, dw_matmul = spec.matmuls
    dtypes, operand, x_shape_TK = spec.dtypes, spec.matmuls.x_for_dw, spec.x_shape_TK
    fmt = operand.quantized_to
    dx_inner, dw_inner = inner_dtype(dx_matmul, dtypes.y, dtypes.x), inner_dtype(dw_matmul, dtypes.y, dtypes.w)

    def values(x: Codes | Tensor) -> Tensor:
        """Return x (T, K) as it is multiplied."""
        if isinstance(x, Tensor):
            return x.reshape(*x_shape_TK).to(dw_inner)
        return unpack(x.codes, x.scales, fmt, x_shape_TK, operand.axis, dw_inner)

    def call(dy: Tensor, w_NK: Tensor | None, x: Codes | Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        dy_TN, dx, dw_NK = dy.reshape(x_shape_TK[0], dy.shape[-1]), None, None
        with torch._C._DisableAutocast():
            if w_NK is not None:
                dx = TORCH.run(dx_matmul, dy_TN.to(dx_inner), w_NK.to(dx_inner), None)
                dx = dx.to(dtypes.x).view(spec.x_shape)
            if x is not None:
                dw_NK = TORCH.run(dw_matmul, dy_TN.to(dw_inner).mT, values(x), None).to(dtypes.w)
        return dx, dw_NK

    return call
