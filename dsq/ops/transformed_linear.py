"""A linear layer under torch.func: the passes of dsq.linear in the form that its transforms take, slower to call."""

from typing import Any

import torch
from torch import Tensor

from dsq.kernels.backend import Codes, Dtypes, LinearMatMuls
from dsq.ops import linear_passes


def transformed_linear(
    x: Tensor, w_NK: Tensor, bias_N: Tensor | None, matmuls: LinearMatMuls, seed: int | None
) -> Tensor:
    """y (..., N) of x (..., K), under torch.func.grad or what is made of it; no vmap, nothing in forward mode."""
    y: Tensor = _TransformedLinear.apply(x, w_NK, bias_N, matmuls, seed)[0]  # type: ignore[no-untyped-call]
    return y


class _TransformedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        x: Tensor, w_NK: Tensor, bias_N: Tensor | None, matmuls: LinearMatMuls, seed: int | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        packing = matmuls.stash.format is not None
        y, stash = linear_passes.forward(matmuls, x, w_NK, bias_N, seed, stashing=packing)
        return (y, stash.codes, stash.scales) if isinstance(stash, Codes) else (y, None, None)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        x, w_NK, _, ctx.matmuls, ctx.seed = inputs
        y, codes, scales = output
        ctx.x_shape, ctx.dtypes = linear_passes.matrix(x).shape, Dtypes(x.dtype, w_NK.dtype, y.dtype)
        if codes is not None:
            ctx.mark_non_differentiable(codes, scales)
        ctx.save_for_backward(w_NK, x if codes is None else codes, scales)

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: Any) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        w_NK, x1, scales = ctx.saved_tensors
        x_wanted, w_wanted, bias_wanted = ctx.needs_input_grad[:3]
        given = w_NK if x_wanted else None, x1 if w_wanted else None, scales if w_wanted else None
        rest = ctx.x_shape, ctx.matmuls, ctx.dtypes, ctx.seed
        dx, dw_NK = _TransformedGradient.apply(dy, *given, *rest)  # type: ignore[no-untyped-call]
        return dx, dw_NK, linear_passes.matrix(dy).sum(0) if bias_wanted else None, None, None


class _TransformedGradient(torch.autograd.Function):
    """The backward, below the transform that asks for it: torch.func.grad always makes a graph of it."""

    @staticmethod
    def forward(
        dy: Tensor,
        w_NK: Tensor | None,
        x1: Tensor | None,
        scales: Tensor | None,
        shape: torch.Size,
        matmuls: LinearMatMuls,
        dtypes: Dtypes,
        seed: int | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        stash = Codes(x1, scales, shape) if x1 is not None and scales is not None else x1
        return linear_passes.backward(matmuls, dtypes, dy, w_NK, stash, seed)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> None:
        raise RuntimeError("dsq.functional.linear is differentiable once: torch.func.grad of its gradient is refused")
