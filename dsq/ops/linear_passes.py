"""The two passes of a linear layer, forward and backward.

Both follow a plan, which is made once for a layer's formats, shapes and dtypes. A pass is one call of the backend if
the backend has such a call for the plan (DirectCalls), for example one that packs x while it multiplies. Otherwise it
runs product by product. Compilers, dispatch modes and special tensors always see products, which are registered
operators (ops/products.py). Shape suffixes as in dsq.linear: T tokens, K in-features, N out-features.
"""

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dsq.kernels.backend import (
    Backend,
    BackwardCall,
    Codes,
    Dtypes,
    ForwardCall,
    LinearMatMuls,
    LinearSpec,
    MatMul,
    Operand,
    check_codes,
    of_stored_transpose,
)
from dsq.kernels.dispatch import backend_for, gemm_for, layout_of, may_bypass_dispatcher
from dsq.ops.checks import check_linear, check_present
from dsq.ops.products import any_autocast, autocast_dtype, multiply, packed
from dsq.ops.unquantized_passes import UnquantizedBackward, backward_call, forward_call, leaves_products

_MAX_PLANS = 4096
RECOMPUTED_BITS = 8  #: in which a recomputed x enters dw: it was rounded before, at q1

#: x as the backward reads it: as it came, or in codes
SavedInput = Tensor | Codes


@dataclass(frozen=True, slots=True, eq=False)
class DirectCalls:
    """The calls of a backend that run whole passes of a layer. A pass without one runs product by product."""

    backend: Backend
    spec: LinearSpec  #: its products and weight as the weight lies in memory
    stored_as_KN: bool  #: the weight lies in memory as (K, N)
    saved_shapes: Any  #: shape and dtype of codes, and of scales
    forward: ForwardCall | None  #: None, as below, where the backend has no call for these products
    #: by whether dx and dw are needed; made at the first backward
    backward: dict[tuple[bool, bool], BackwardCall | None]
    of_unquantized: UnquantizedBackward | None = None  #: that of products that PyTorch multiplies


class LinearPlan(NamedTuple):
    """How a layer of given formats, shapes and dtypes runs."""

    matmuls: LinearMatMuls
    x_for_dw: Operand  #: x as it is saved for the backward
    dtypes: Dtypes
    x_shape_TK: torch.Size  #: (T, K)
    direct_calls: DirectCalls | None  #: None where a compiler, a mode or a special tensor is to see each product


_plans: dict[Any, LinearPlan] = {}


def plan_of(matmuls: LinearMatMuls, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, stochastic: bool) -> LinearPlan:
    """Return the plan of a layer: y (..., N) of x (..., K).

    Under autocast operands are quantized from the tensors as they come, and y takes autocast's dtype. Raises what
    ``dsq.functional.linear`` promises.
    """
    autocast = autocast_dtype(x) if any_autocast() else None
    dense = x.layout is w_NK.layout is torch.strided and not x.is_nested
    if not dense or not may_bypass_dispatcher(x, w_NK, bias_N):
        check_linear(x, w_NK, bias_N, autocast is not None)
        dtypes = Dtypes(x.dtype, w_NK.dtype, autocast or x.dtype)
        return LinearPlan(matmuls, matmuls.x_for_dw, dtypes, as_rows(x).shape, None)
    # stochastic rounding draws by the place in (N, K)
    stored_as_KN = not stochastic and not w_NK.is_contiguous() and w_NK.dim() == 2 and w_NK.t().is_contiguous()
    bias = None if bias_N is None else (bias_N.shape, bias_N.dtype, bias_N.device)
    backend = backend_for(x.device)
    of_tensors = (x.shape, x.dtype, x.device, w_NK.shape, w_NK.dtype, w_NK.device, stored_as_KN, bias, autocast)
    key = (matmuls, backend, stochastic, of_tensors)
    cached = _plans.get(key)
    if cached is None:
        check_linear(x, w_NK, bias_N, autocast is not None)
        dtypes = Dtypes(x.dtype, w_NK.dtype, autocast or x.dtype)
        spec = LinearSpec(matmuls, dtypes, x.shape, w_NK.t().shape if stored_as_KN else w_NK.shape, stochastic)
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        cached = _plans[key] = _new_plan(spec, stored_as_KN, backend)
    return cached


@lru_cache(maxsize=_MAX_PLANS)
def plan_of_recomputed(calls: DirectCalls, matmuls: LinearMatMuls) -> LinearPlan:
    """Return the plan of the same layer for an x that is recomputed, which enters dw in at least RECOMPUTED_BITS."""
    operand = matmuls.weight_gradient.b
    fmt = operand.quantized_to.at(max(RECOMPUTED_BITS, operand.quantized_to.bits))
    dw = replace(matmuls.weight_gradient, b=replace(operand, format=fmt))
    spec = calls.spec._replace(matmuls=matmuls._replace(weight_gradient=dw))
    return _new_plan(spec, calls.stored_as_KN, calls.backend)


def forward(
    plan: LinearPlan, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, seed: int | None, stashing: bool
) -> tuple[Tensor, SavedInput | None]:
    """Return y (..., N), and x for the backward if ``stashing``."""
    matmuls, calls = plan.matmuls, plan.direct_calls
    packing = stashing and plan.x_for_dw.packs
    if calls is not None and calls.forward is not None:
        y, codes = calls.forward(x, w_NK.t() if calls.stored_as_KN else w_NK, bias_N, seed, packing)
    else:
        x_TK = as_rows(x)
        y = multiply(matmuls.output, x_TK, w_NK, bias_N, seed, plan.dtypes.y)
        if x.dim() != 2:  # autograd does not let a view be changed in place that a Function gives
            y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], w_NK.shape[0]))
        codes = packed(plan.x_for_dw, x_TK, seed) if packing else None
    if codes is not None:
        return y, codes
    return y, x.detach().to(plan.dtypes.y) if stashing else None


def backward(
    plan: LinearPlan, dy: Tensor, w_NK: Tensor | None, saved_x: SavedInput | None, seed: int | None
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx (..., K) of dy (..., N), None without ``w_NK``, and dw (N, K), None without ``saved_x``."""
    calls = plan.direct_calls
    if calls is not None and w_NK is not None:
        check_present(w_NK, torch.Size((dy.shape[-1], plan.x_shape_TK[1])))
    if calls is not None and calls.of_unquantized is not None:
        return calls.of_unquantized(dy, w_NK, saved_x)
    if calls is not None and not isinstance(saved_x, Tensor) and may_bypass_dispatcher(dy, w_NK):
        if (
            saved_x is not None
            and (saved_x.codes.shape, saved_x.codes.dtype, saved_x.scales.shape, saved_x.scales.dtype)
            != calls.saved_shapes
        ):
            assert plan.x_for_dw.format is not None  # saved-tensor hooks may give back anything
            check_codes(
                saved_x.codes, saved_x.scales, plan.x_for_dw.format, layout_of(plan.x_shape_TK, plan.x_for_dw.axis)
            )
        gradients = w_NK is not None, saved_x is not None
        if gradients not in calls.backward:
            calls.backward[gradients] = _backward_call(calls, *gradients)
        call = calls.backward[gradients]
        if call is not None:
            return call(dy, w_NK.t() if w_NK is not None and calls.stored_as_KN else w_NK, saved_x, seed)
    dy_TN, dx, dw_NK = as_rows(dy), None, None
    if w_NK is not None:
        dx = multiply(plan.matmuls.input_gradient, dy_TN, w_NK, None, seed, plan.dtypes.x)
        dx = dx.view(*dy.shape[:-1], w_NK.shape[1])
    if saved_x is not None:
        x_TK = saved_x if isinstance(saved_x, Codes) else as_rows(saved_x)
        dw_NK = multiply(plan.matmuls.weight_gradient, dy_TN, x_TK, None, seed, plan.dtypes.w)
    return dx, dw_NK


def as_rows(x: Tensor) -> Tensor:
    """Return (..., K) as (T, K)."""
    dims = x.dim()
    return x if dims == 2 else x.flatten(0, -2) if dims > 2 else x[None]


def _new_plan(spec: LinearSpec, stored_as_KN: bool, backend: Backend) -> LinearPlan:
    """Return the plan of a layer whose products are those of w (N, K), its shapes those that lie in memory."""
    matmuls, dtypes = spec.matmuls, spec.dtypes
    stored = spec._replace(matmuls=of_stored_transpose(matmuls)) if stored_as_KN else spec
    shape_TK, fmt = stored.x_shape_TK, matmuls.x_for_dw.format
    saved_shapes = call = of_unquantized = None
    if fmt is not None and fmt.packs:
        layout = layout_of(shape_TK, matmuls.x_for_dw.axis)
        saved_shapes = (layout.code_shape(fmt.bits), torch.uint8, fmt.scale_shape(layout), torch.uint8)
    output = stored.matmuls.output
    if leaves_products(matmuls) and torch.float64 not in dtypes:
        call, of_unquantized = forward_call(spec), backward_call(spec)
        stored_as_KN = False  # PyTorch reads either order
    elif backend.linear is not None and _fusable(backend, stored, output, stored.matmuls.weight_gradient):
        gemm = gemm_for(output, dtypes.y, output.sizes(shape_TK, stored.w_shape), backend).name
        call = backend.linear.forward(stored, gemm)
    calls = DirectCalls(backend, stored, stored_as_KN, saved_shapes, call, {}, of_unquantized)
    return LinearPlan(matmuls, matmuls.x_for_dw, dtypes, shape_TK, calls)


def _backward_call(calls: DirectCalls, needs_dx: bool, needs_dw: bool) -> BackwardCall | None:
    """Return one call of the backend for the gradients asked for; None if it has none."""
    spec, backend = calls.spec, calls.backend
    dx, dw = spec.matmuls.input_gradient, spec.matmuls.weight_gradient
    gradients = (dx, spec.w_shape, needs_dx), (dw, spec.x_shape_TK, needs_dw)
    if backend.linear is None or not _fusable(backend, spec, *(matmul for matmul, _, needed in gradients if needed)):
        return None
    dx_gemm, dw_gemm = (
        gemm_for(matmul, spec.dtypes.y, matmul.sizes(spec.y_shape_TN, shape), backend).name if needed else None
        for matmul, shape, needed in gradients
    )
    return backend.linear.backward(spec, (dx_gemm, dw_gemm))


def _fusable(backend: Backend, spec: LinearSpec, *matmuls: MatMul) -> bool:
    """Return whether the backend can have one call for these products: their operands, and results that have a format,
    are packed in formats of its own."""
    if torch.float64 in spec.dtypes or 0 in (*spec.x_shape, *spec.w_shape):
        return False
    if not all(matmul.rounds_alike for matmul in matmuls):
        return False
    formats = [fmt for m in matmuls for fmt in (m.a.format, m.b.format, *([m.result] if m.result else []))]
    return all(fmt is not None and backend.serves(fmt) for fmt in formats)
