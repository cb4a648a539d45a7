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
from dsq.kernels.product_dtype import operand_cast, product_dtype
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
    dtypes, operand, x_shape_TK = spec.dtypes, spec.matmuls.x_for_dw, spec.x_shape_TK
    fmt = operand.quantized_to
    inner = inner_dtype(spec.matmuls.output, dtypes.x, dtypes.y)
    cast_x, cast_w = (operand_cast(source, inner, spec.device_type) for source in (dtypes.x, dtypes.w))

    def call(
        x: Tensor, w_NK: Tensor, bias_N: Tensor | None, seed: int | None, packing: bool
    ) -> tuple[Tensor, Codes | None]:
        x_TK = x.reshape(*x_shape_TK)
        a, b = cast_x(x_TK), cast_w(w_NK).mT
        with torch._C._DisableAutocast():
            y = a @ b if bias_N is None else torch.addmm(bias_N.to(inner).to(a.dtype), a, b)
        del a, b  # before codes are allocated
        y = y.to(inner).to(dtypes.y)
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
    dw_product_dtype = product_dtype(dw_inner, spec.device_type)
    cast_dy, cast_w = (operand_cast(source, dx_inner, spec.device_type) for source in (dtypes.y, dtypes.w))
    cast_dy_for_dw, cast_x = (operand_cast(source, dw_inner, spec.device_type) for source in (dtypes.y, dtypes.x))

    def values(x: Codes | Tensor) -> Tensor:
        """Return x (T, K) as it is multiplied."""
        if isinstance(x, Tensor):
            return cast_x(x.reshape(*x_shape_TK))
        return unpack(x.codes, x.scales, fmt, x_shape_TK, operand.axis, dw_inner).to(dw_product_dtype)

    def call(dy: Tensor, w_NK: Tensor | None, x: Codes | Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        dy_TN, dx, dw_NK = dy.reshape(x_shape_TK[0], dy.shape[-1]), None, None
        with torch._C._DisableAutocast():
            if w_NK is not None:
                dx = (cast_dy(dy_TN) @ cast_w(w_NK)).to(dx_inner).to(dtypes.x).view(spec.x_shape)
            if x is not None:
                dw_NK = (cast_dy_for_dw(dy_TN).mT @ values(x)).to(dw_inner).to(dtypes.w)
        return dx, dw_NK

    return call
