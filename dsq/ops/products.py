"""Quantized products: quantize, multiply, quantize. Of a layer's matrices, of two activations, of attention.

    two activations    y  = Q0(a) Q0(b)              stash Q1(a) and Q1(b), packed
                       da = Q2(dy) Q1(b)^T           db = Q1(a)^T Q2(dy)
    attention          S  = scale Q0(q) Q0(k)^T + mask      P = dropout(softmax(S))      y = Q0(P) Q0(v)

``multiply`` is a registered operator too, which is what compilers, modes and counters of FLOPs see. Blocks run along
the contraction of the product that consumes the tensor. Shape suffixes: M rows, K the contraction, N columns; L
queries, S keys, D features, E features of a value. Leading dimensions are batches and broadcast; an operand is stashed
as it came. A matrix b multiplies the rows of a whole batch in one product, as a layer's weight does.
"""

import math
import sys
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.library import register_autograd
from torch.utils.flop_counter import register_flop_formula

from dsq.formats import GridFormat, Layout
from dsq.kernels.backend import Codes, MatMul, Operand, check_codes, parse_matmul
from dsq.kernels.dispatch import backend_for, define, gemm_for, may_bypass_dispatcher, pack, quantize, signed, unpack
from dsq.kernels.reference.backend import TORCH
from dsq.ops.checks import refuse_transforms
from dsq.ops.hadamard import transform
from dsq.ops.seeds import SeedOffset

any_autocast = torch._C._is_any_autocast_enabled  # to ask for one device takes six times as long


def multiply(
    matmul: MatMul,
    a: Tensor,
    b: Tensor | Codes,
    bias_N: Tensor | None = None,
    seed: int | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return ``a b`` (+ bias), with what ``matmul`` says of both and of the result; in ``dtype`` (default: that of
    ``a``).

    PyTorch multiplies in the narrower of the dtypes of ``a`` and of the result. Batches of matrices broadcast, and are
    always PyTorch's to multiply; the axes in ``matmul`` then count from the end.

    ``seed`` None rounds to nearest; a number rounds stochastically, each tensor with random numbers of its own.
    """
    dtype = dtype or a.dtype
    if may_bypass_dispatcher(a, bias_N):
        return _multiply(matmul, a, b, bias_N, seed, dtype)
    codes, scales, shape = b if isinstance(b, Codes) else (b, None, None)
    result: Tensor = torch.ops.dsq.multiply(a, codes, scales, shape, bias_N, matmul.text, signed(seed), dtype)
    return result


def _multiply(
    matmul: MatMul, a: Tensor, b: Tensor | Codes, bias_N: Tensor | None, seed: int | None, dtype: torch.dtype
) -> Tensor:
    _check_operands(matmul, a, b, bias_N)
    batched = max(a.dim(), len(b.shape)) > 2
    inner = inner_dtype(matmul, a.dtype, dtype)
    unquantized = matmul.a.format is matmul.b.format is None  # as the trainer multiplies
    gemm = TORCH
    if not (batched or unquantized):
        gemm = gemm_for(matmul, inner, matmul.sizes(a.shape, b.shape), backend_for(a.device))
    if bias_N is not None:
        bias_N = bias_N.to(inner if gemm is TORCH else torch.promote_types(inner, torch.float32))
    a_operand: Any  # as the kernel takes it
    b_operand: Any
    if gemm.packed:
        a_operand, b_operand = packed(matmul.a, a, seed), packed(matmul.b, b, seed)
        if gemm.convert is not None:
            a_operand, b_operand = gemm.convert(matmul.a, a_operand), gemm.convert(matmul.b, b_operand)
    else:
        a_operand = _values(matmul.a, a, gemm.a_dtype or inner, seed)
        b_operand = _values(matmul.b, b, gemm.b_dtype or inner, seed)
    with torch._C._DisableAutocast():  # which would round values that have inner's dtype
        result = gemm.run(matmul, a_operand, b_operand, bias_N)
    if matmul.result is None:
        return result.to(dtype)
    return quantize(result, matmul.result, -1, matmul.seed_of_result(seed), dtype)


def inner_dtype(matmul: MatMul, a_dtype: torch.dtype, result_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the values that are multiplied: the narrower of both dtypes, or float32 where that would
    round values of a grid."""
    dtype = a_dtype if a_dtype.itemsize <= result_dtype.itemsize else result_dtype
    if dtype in (torch.float32, torch.float64):
        return dtype
    grids = [fmt for fmt in (matmul.a.format, matmul.b.format) if isinstance(fmt, GridFormat)]
    exact = all(dtype is torch.bfloat16 and fmt.exact_in_bfloat16 for fmt in grids)
    return dtype if exact else torch.float32


def _check_operands(matmul: MatMul, a: Tensor, b: Tensor | Codes, bias: Tensor | None) -> None:
    """Raise ValueError for operands and a bias that do not fit: the kernels read memory as their shapes say."""
    a_axis, b_axis = matmul.contracted()
    if min(a.dim(), len(b.shape)) < 2 or a.shape[a_axis - 2] != b.shape[b_axis - 2]:
        raise ValueError(f"a and b must share the axis summed over, got {tuple(a.shape)} and {tuple(b.shape)}")
    columns = b.shape[-1 - b_axis]
    if bias is not None and bias.shape != (columns,):
        raise ValueError(f"bias must be ({columns},), got {tuple(bias.shape)}")
    if isinstance(b, Codes) and matmul.b.format is not None:  # saved-tensor hooks may give back anything
        check_codes(b.codes, b.scales, matmul.b.format, Layout.of(b.shape, matmul.b.axis))


def packed(operand: Operand, x: Tensor | Codes, seed: int | None) -> Codes:
    """Return ``x`` in the bits of ``operand``, which has a format."""
    if isinstance(x, Codes):
        return x
    before = _before_rounding(operand, x, seed)
    return Codes(*pack(before, operand.quantized_to, operand.axis, operand.seed_of(seed)), x.shape)


def _values(operand: Operand, x: Tensor | Codes, dtype: torch.dtype, seed: int | None) -> Tensor:
    """Return the operand as it is multiplied."""
    if isinstance(x, Codes):
        values = unpack(x.codes, x.scales, operand.quantized_to, x.shape, operand.axis, dtype)
    elif operand.format is None:
        values = x.to(dtype)
    else:
        values = quantize(
            _before_rounding(operand, x, seed), operand.format, operand.axis, operand.seed_of(seed), dtype
        )
    return values.mT if operand.transposed else values


def _before_rounding(operand: Operand, x: Tensor, seed: int | None) -> Tensor:
    """Return the values that ``operand`` rounds: those of the forward's format, and transformed, where it says so."""
    if operand.first is not None and operand.first.format is not None:
        x = quantize(x, operand.first.format, operand.first.axis, operand.first.seed_of(seed))
    if not operand.hadamard:
        return x
    return transform(x, operand.axis, operand.hadamard, seed if operand.random_signs else None)


class ActivationMatMuls(NamedTuple):
    """The product y = a b, and the two products of its gradients."""

    output: MatMul  #: of a and b
    a_gradient: MatMul  #: of dy and the packed b
    b_gradient: MatMul  #: of dy and the packed a: its transpose


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype that autocast asks for, if it is on; it leaves float64 alone."""
    if not any_autocast() or not torch.is_autocast_enabled(x.device.type) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(x.device.type)


def matmul_of_activations(a_MK: Tensor, b_KN: Tensor, matmuls: ActivationMatMuls, seed: int | None = None) -> Tensor:
    """Return ``a @ b`` with every operand quantized: dsq.functional.matmul behind its checks of types.

    Under autocast the operands are quantized as they are, and y is in autocast's dtype. Raises RuntimeError under a
    transform of torch.func.
    """
    autocast = autocast_dtype(a_MK)
    if autocast is None and a_MK.dtype != b_KN.dtype:
        raise TypeError(f"a and b must share a floating dtype, got {a_MK.dtype} and {b_KN.dtype}")
    if min(a_MK.dim(), b_KN.dim()) < 2 or a_MK.shape[-1] != b_KN.shape[-2]:
        raise ValueError(f"a must be (..., M, K) and b (..., K, N), got {tuple(a_MK.shape)} and {tuple(b_KN.shape)}")
    refuse_transforms()
    if b_KN.dim() == 2 and a_MK.dim() > 2:  # else its gradient would be summed over one for each element of the batch
        return matmul_of_activations(a_MK.flatten(0, -2), b_KN, matmuls, seed).unflatten(0, a_MK.shape[:-1])  # type: ignore[no-any-return]
    trained = torch.is_grad_enabled() and (a_MK.requires_grad or b_KN.requires_grad)
    if trained or forward_ad._current_level >= 0:  # PyTorch refuses an autograd function in forward mode
        return _MatMulOfActivations.apply(a_MK, b_KN, matmuls, seed, autocast)  # type: ignore[no-any-return, no-untyped-call]
    return multiply(matmuls.output, a_MK, b_KN, seed=seed, dtype=autocast)


class _MatMulOfActivations(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, a_MK: Tensor, b_KN: Tensor, matmuls: ActivationMatMuls, seed: int | None, dtype: torch.dtype | None
    ) -> Tensor:
        a1 = _saved_operand(matmuls.b_gradient.b, a_MK, seed) if ctx.needs_input_grad[1] else (None, None)
        b1 = _saved_operand(matmuls.a_gradient.b, b_KN, seed) if ctx.needs_input_grad[0] else (None, None)
        ctx.save_for_backward(*a1, *b1)  # what hooks and the meter see
        ctx.shapes, ctx.matmuls, ctx.seed = (a_MK.shape, b_KN.shape), matmuls, seed
        return multiply(matmuls.output, a_MK, b_KN, seed=seed, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if torch.is_grad_enabled():
            once = "a quantized product is differentiable once: create_graph=True is not supported"
            raise RuntimeError(f"{once}; call dsq.unconvert(model) first")
        a1, a_scales, b1, b_scales = ctx.saved_tensors
        da_MK = db_KN = None
        if a1 is not None:  # attention's weights are unpacked before there is a gradient of their size
            a = a1 if a_scales is None else Codes(a1, a_scales, ctx.shapes[0])
            db_KN = multiply(ctx.matmuls.b_gradient, dy_MN, a, seed=ctx.seed).mT.sum_to_size(ctx.shapes[1])
        if b1 is not None:
            b = b1 if b_scales is None else Codes(b1, b_scales, ctx.shapes[1])
            da_MK = multiply(ctx.matmuls.a_gradient, dy_MN, b, seed=ctx.seed).sum_to_size(ctx.shapes[0])
        return da_MK, db_KN, None, None, None


def _saved_operand(operand: Operand, x: Tensor, seed: int | None) -> tuple[Tensor, Tensor | None]:
    """Return ``x`` as it is saved for the backward: codes and scales, or itself."""
    if not operand.packs:
        return x, None
    codes, scales, _ = packed(operand, x, seed)
    return codes, scales


def attention(
    q_LD: Tensor,
    k_SD: Tensor,
    v_SE: Tensor,
    matmuls: ActivationMatMuls,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Return y (..., L, E) and the weights P (..., L, S): what F.scaled_dot_product_attention says of these arguments.

    ``matmuls``: of both products. ``seed`` None rounds to nearest. A query that attends to nothing gives
    zeros. Raises ValueError where ``is_causal`` and ``attn_mask`` are both given, or shapes do not fit.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal and attn_mask were both given: give one of them")
    multiply_heads = _grouped if enable_gqa else matmul_of_activations
    scores = multiply_heads(q_LD, k_SD.mT, matmuls, seed) * (1 / math.sqrt(q_LD.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = scores.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask.to(scores.dtype)  # which saves nothing, where masked_fill saves the mask
    weights = torch.ops.aten._safe_softmax(scores, -1)
    del scores  # the largest tensor, with the weights
    if dropout_p:
        weights, _ = torch.native_dropout(weights, dropout_p, True)  # on CPUs F.dropout saves a float a value
    return multiply_heads(weights, v_SE, matmuls, None if seed is None else seed + SeedOffset.NUMBER), weights


def _grouped(a_MK: Tensor, b_KN: Tensor, matmuls: ActivationMatMuls, seed: int | None) -> Tensor:
    """Return the products of the heads of ``a`` by those of ``b``, each of which serves several in a row."""
    by_group = a_MK.unflatten(-3, (b_KN.shape[-3], -1))
    return matmul_of_activations(by_group, b_KN.unsqueeze(-3), matmuls, seed).flatten(-4, -3)


def _operator(a: Tensor, b: Tensor, scales: Any, shape: Any, bias: Any, matmul: str, seed: Any, dtype: Any) -> Tensor:
    operand = b if scales is None or shape is None else Codes(b, scales, torch.Size(shape))
    return _multiply(parse_matmul(matmul), a, operand, bias, seed, dtype)


def _fake(a: Tensor, b: Tensor, scales: Any, shape: Any, bias: Any, matmul: str, seed: Any, dtype: Any) -> Tensor:
    if "torch.onnx" in sys.modules and torch.onnx.is_in_onnx_export():  # else nothing imported it
        raise RuntimeError("ONNX has no quantized product: call dsq.unconvert(model) before torch.onnx.export")
    b_shape = b.shape if shape is None else shape
    sizes = parse_matmul(matmul).sizes(a.shape, b_shape)
    return a.new_empty((*torch.broadcast_shapes(a.shape[:-2], b_shape[:-2]), *sizes[:2]), dtype=dtype)


def _flops(a_shape: Any, b_shape: Any, _: Any, shape: Any, bias: Any, matmul: str, *__: Any, **___: Any) -> int:
    b_shape = b_shape if shape is None else shape
    sizes = parse_matmul(matmul).sizes(a_shape, b_shape)
    return 2 * prod((*torch.broadcast_shapes(a_shape[:-2], b_shape[:-2]), *sizes))


# b: values; or codes, with their scales and the shape of the values
define(
    "multiply(Tensor a, Tensor b, Tensor? scales, SymInt[]? shape, Tensor? bias, str matmul, SymInt? seed,"
    " ScalarType dtype) -> Tensor",
    _operator,
    _fake,
)
register_flop_formula(torch.ops.dsq.multiply)(_flops)


def _refuse(ctx: Any, dy: Tensor) -> None:
    raise RuntimeError(
        "a quantized product has no gradient of its own: dsq layers are differentiable once (no create_graph), and not "
        "in a graph of torch.export, which has the forward alone"
    )


register_autograd("dsq::multiply", _refuse)
