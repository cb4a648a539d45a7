"""Rules of the products: linear layers, matrix products, convolutions.

An operand is saved if the other one needs a gradient. Rounding an operand moves the other's gradient by the mean of
many rounding errors, so low bits are safest here (DSQ, section 3). Shape suffixes: K in-, N out-features.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.kernels.backend import Codes
from dsq.kernels.dispatch import pack
from dsq.linear import linear
from dsq.ops import linear_passes
from dsq.ops.einsum import as_product, two_operands
from dsq.ops.linear_passes import LinearPlan
from dsq.ops.shared_inputs import input_key
from dsq.ops.unquantized_passes import in_product_dtype
from dsq.quantizers import Quantizers
from dsq.stash.memory import is_weight
from dsq.stash.saved_forms import save, saved
from dsq.stash.stash import Stash


def unquantized_linear(stash: Stash, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (weight.requires_grad and input.dim() > 1 and weight.dim() == 2):
        return F.linear(input, weight, bias)
    return UnquantizedLinear.apply(stash, input, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class UnquantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, w_NK: Tensor, bias: Tensor | None) -> Tensor:
        save(ctx, stash.code(x, "linear"), w_NK if ctx.needs_input_grad[1] else None)
        y = in_product_dtype(F.linear, x, w_NK, bias)
        # not a view: fairseq's attention scales it in place
        return torch.ops.aten._unsafe_view(y, y.shape)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor | None, Tensor, Tensor | None]:
        x, w_NK = saved(ctx)
        # vmap, which is_grads_batched=True runs this in, has no rule for flatten
        dy_TN, x_TK = dy.reshape(-1, dy.shape[-1]), x.flatten(0, -2).to(dy.dtype)
        dx = None if w_NK is None else in_product_dtype(torch.matmul, dy, w_NK.to(dy.dtype))
        dw_NK = in_product_dtype(torch.matmul, dy_TN.t(), x_TK)
        return None, dx, dw_NK, dy_TN.sum(0) if ctx.needs_input_grad[3] else None


def addmm(stash: Stash, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Run torch.addmm(bias, x, w), as transformers' Conv1D calls it."""
    if beta != 1 or alpha != 1 or not mat2.requires_grad or input.dim() != 1:
        return torch.addmm(input, mat1, mat2, beta=beta, alpha=alpha)
    return unquantized_linear(stash, mat1, mat2.t(), input)


def quantized_linear(stash: Stash, x: Tensor, weight: Tensor, bias: Tensor | None, precision: Any) -> Tensor:
    """Run dsq.functional.linear: saving Q1(x), unless x is saved or recomputed already."""
    if not isinstance(x, Tensor):
        return linear(x, weight, bias, precision)  # which refuses it
    quantizers = precision if type(precision) is Quantizers else Quantizers.of(precision)
    operand = quantizers.linear_matmuls.x_for_dw
    # a transformed operand has codes of other values than x, of no use to other operations
    if not weight.requires_grad or not operand.packs or operand.transforms:
        return linear(x, weight, bias, quantizers)
    plan = linear_passes.plan_of(quantizers.linear_matmuls, x, weight, bias, quantizers.draws)
    if plan.direct_calls is None:  # a compiler, or a mode, sees products
        return linear(x, weight, bias, quantizers)
    seed = quantizers.seed()
    return QuantizedLinear.apply(stash, x, weight, bias, plan, seed, quantizers.names_stash)  # type: ignore[no-any-return, no-untyped-call]


class QuantizedLinear(torch.autograd.Function):
    """The function of dsq.linear. It saves x as new codes, as codes of another layer, or, where the level does not name
    the format of x in dw (``own_codes``), in a form that x has."""

    @staticmethod
    def forward(
        ctx: Any,
        stash: Stash,
        x: Tensor,
        w_NK: Tensor,
        bias: Tensor | None,
        plan: LinearPlan,
        seed: int | None,
        own_codes: bool,
    ) -> Tensor:
        key = input_key(x, plan.x_for_dw, seed is None)
        codes, form = stash.find_input(key, x)
        if own_codes:
            form = None
        y, new_codes = linear_passes.forward(plan, x, w_NK, bias, seed, stashing=codes is None and form is None)
        if isinstance(new_codes, Codes):
            codes = new_codes
            stash.put_input(key, x, plan.x_for_dw, codes)
        save(ctx, w_NK if ctx.needs_input_grad[1] else None, form, *((None, None) if codes is None else codes[:2]))
        ctx.plan = plan
        ctx.seed = seed
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        w_NK, x, codes, scales = saved(ctx)
        plan = ctx.plan
        if x is not None and plan.direct_calls.of_unquantized is not None:
            x_or_codes = x.to(plan.dtypes.y)  # wider values would be held until the end of the product
        elif x is not None:
            plan = linear_passes.plan_of_recomputed(plan.direct_calls, plan.matmuls)
            # the product could quantize the values itself, but would hold them until its end: 16 of a GPT's 260 MiB
            packed = pack(linear_passes.as_rows(x), plan.x_for_dw.quantized_to, plan.x_for_dw.axis)
            x_or_codes = Codes(*packed, plan.x_shape_TK)
        else:
            x_or_codes = Codes(codes, scales, plan.x_shape_TK)
        del x
        dx, dw_NK = linear_passes.backward(plan, dy, w_NK, x_or_codes, ctx.seed)
        db_N = linear_passes.as_rows(dy).sum(0) if ctx.needs_input_grad[3] else None
        return None, dx, dw_NK, db_N, None, None, None


def matmul(stash: Stash, input: Tensor, other: Tensor) -> Tensor:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor) or min(input.dim(), other.dim()) < 2:
        return torch.matmul(input, other)
    return UnquantizedMatMul.apply(stash, input, other)  # type: ignore[no-any-return, no-untyped-call]


def bmm(stash: Stash, input: Tensor, mat2: Tensor) -> Tensor:
    return matmul(stash, input, mat2)


def einsum(stash: Stash, equation: Any, *operands: Any) -> Tensor:
    """Run torch.einsum: of two operands by the rule of its product, if it is one of matrices."""
    pair = two_operands(equation, operands)
    product = None if pair is None else as_product(equation, *pair)
    if pair is None or product is None:
        return torch.einsum(equation, *operands)
    weights = tuple(map(is_weight, pair))  # arranged, they may be copies
    return product.result(UnquantizedMatMul.apply(stash, product.a, product.b.mT, weights))  # type: ignore[no-untyped-call]


class UnquantizedMatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, a: Tensor, b: Tensor, weights: tuple[bool, ...] = (False, False)) -> Tensor:
        needs_da, needs_db = ctx.needs_input_grad[1:3]
        y: Tensor = in_product_dtype(torch.matmul, a, b)
        forms = [
            stash.factor(a, "product", needs_db, exact=weights[0]),
            stash.factor(b, "product", needs_da, exact=weights[1]),
        ]
        for place, (form, x, other) in enumerate(zip(forms, (a, b), (b, a), strict=True)):
            # of which PyTorch saves what it expands for the batch, or folds into one matrix
            is_folded = other.dim() == 2 and not (x.mT if place else x).is_contiguous()
            if form is x and x.dim() > 2 and (is_folded or x.shape[:-2] != y.shape[:-2]):
                forms[place] = stash.copy(x)
        save(ctx, *forms)
        ctx.shapes = a.shape, b.shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        a, b = saved(ctx)
        da = None if b is None else _sum_over_batch(dy.mT, b.mT.to(dy.dtype), ctx.shapes[0])
        db = None if a is None else _sum_over_batch(a.to(dy.dtype), dy, ctx.shapes[1])
        return None, da, db, None


def _sum_over_batch(x: Tensor, y: Tensor, shape: torch.Size) -> Tensor:
    """Return ``x.mT @ y``, the gradient of a factor of ``shape``, summed over the batch that it was broadcast over.

    A matrix gets one product over all rows of the batch: its gradient for each element of the batch would take as many
    times its memory.
    """
    if len(shape) == 2 and x.dim() > 2:
        # not flatten, for which vmap (is_grads_batched=True) has no rule
        x, y = (z.reshape(z.shape[:-1].numel(), z.shape[-1]) for z in (x, y))
    product: Tensor = in_product_dtype(torch.matmul, x.mT, y)
    return product.sum_to_size(shape)


def grouped_mm(stash: Stash, mat_a: Tensor, mat_b: Tensor, *, offs: Any = None, **options: Any) -> Tensor:
    """Run F.grouped_mm of rows that lie together by group, each group by a matrix of ``mat_b``: an expert each."""
    has_options = any(value is not None for value in options.values())
    if has_options or offs is None or mat_a.dim() != 2 or mat_b.dim() != 3:
        return F.grouped_mm(mat_a, mat_b, offs=offs, **options)
    return GroupedMatMul.apply(stash, mat_a, mat_b, offs)  # type: ignore[no-any-return, no-untyped-call]


class GroupedMatMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, x_TK: Tensor, w_GKN: Tensor, offs_G: Tensor) -> Tensor:
        needs_dx, needs_dw = ctx.needs_input_grad[1:3]
        save(ctx, stash.code(x_TK, "linear") if needs_dw else None, stash.exact(w_GKN) if needs_dx else None, offs_G)
        return F.grouped_mm(x_TK, w_GKN, offs=offs_G)

    @staticmethod
    def backward(ctx: Any, dy_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, w_GKN, offs_G = saved(ctx)
        dy_TN = dy_TN.contiguous()  # its kernel takes no expanded one
        dx = None if w_GKN is None else F.grouped_mm(dy_TN, w_GKN.mT.to(dy_TN.dtype), offs=offs_G)
        dw = None if x_TK is None else F.grouped_mm(x_TK.to(dy_TN.dtype).mT, dy_TN, offs=offs_G)
        return None, dx, dw, None


def convolution(dimensions: int, transposed: bool) -> Any:
    """Return the rule of F.conv{1,2,3}d and F.conv_transpose{1,2,3}d."""
    function = getattr(F, f"conv{'_transpose' if transposed else ''}{dimensions}d")
    defaults = {"stride": 1, "padding": 0}  # in PyTorch's order
    defaults |= {"output_padding": 0, "groups": 1, "dilation": 1} if transposed else {"dilation": 1, "groups": 1}

    def convolve(stash: Stash, input: Tensor, weight: Tensor, bias: Any = None, *values: Any, **named: Any) -> Tensor:
        options = defaults | dict(zip(defaults, values, strict=False)) | named
        if options["padding"] == "same":  # strides are 1
            dilation = as_tuple(options["dilation"], dimensions)
            spans = [step * (size - 1) for step, size in zip(dilation, weight.shape[2:], strict=True)]
            if not any(span % 2 for span in spans):  # else it pads one side more
                options["padding"] = [span // 2 for span in spans]
        elif options["padding"] == "valid":
            options["padding"] = 0
        if input.dim() != dimensions + 2 or isinstance(options["padding"], str):
            return function(input, weight, bias, *values, **named)  # type: ignore[no-any-return]
        tuples = (as_tuple(options[name], dimensions) for name in ("stride", "padding", "dilation"))
        geometry = (*tuples, transposed, as_tuple(options.get("output_padding", 0), dimensions), options["groups"])
        run = partial(function, **options)
        return Convolution.apply(stash, input, weight, bias, run, geometry)  # type: ignore[no-any-return, no-untyped-call]

    return convolve


CONVOLUTIONS = {
    getattr(torch, f"conv{'_transpose' if transposed else ''}{dimensions}d"): convolution(dimensions, transposed)
    for dimensions in (1, 2, 3)
    for transposed in (False, True)
}


def as_tuple(value: Any, count: int) -> list[int]:
    """Return a number for each of ``count`` axes."""
    return [value] * count if isinstance(value, int) else list(value) * (count if len(value) == 1 else 1)


class Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, x: Tensor, w: Tensor, bias: Tensor | None, run: Any, geometry: Any) -> Tensor:
        needs_dx, needs_dw, _ = ctx.needs_input_grad[1:4]
        save(ctx, stash.code(x, "convolution") if needs_dw else None, w if needs_dx else None)
        ctx.geometry = geometry
        ctx.shapes = x.shape, w.shape
        ctx.strides = x.stride(), w.stride()
        return in_product_dtype(run, x, w, bias)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        output_mask = list(ctx.needs_input_grad[1:4])
        sizes = [dy.shape[1]] if output_mask[2] else None

        def run(dy: Tensor, *operands: Tensor | None) -> Any:
            x, w = (  # an operand that was not saved is not read: empty memory of its layout serves
                dy.new_empty_strided(shape, stride) if value is None else value.to(dy.dtype)
                for value, shape, stride in zip(operands, ctx.shapes, ctx.strides, strict=True)
            )
            return torch.ops.aten.convolution_backward(dy, x, w, sizes, *ctx.geometry, output_mask)

        gradients = in_product_dtype(run, dy, *saved(ctx), dtype=dy.dtype)  # autocast leaves it its dtype
        return None, *(g if w else None for g, w in zip(gradients, output_mask, strict=True)), None, None
