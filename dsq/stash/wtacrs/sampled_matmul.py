"""A product of two activations that keeps a sample of each for the other's gradient (WTA-CRS, "TensorMul" of figure 4).

    forward    O  = A B                                          exact; stash k rows of A and k columns of B
    backward   dA = sum_t scale_t dO[:, col_t] B[:, col_t]^T     unbiased (sampling.py)
               dB = sum_t scale_t A[row_t]^T dO[row_t]           unbiased

Unlike a weight's, these gradients flow on: everything before the product sees their noise, unbiased, as the backward is
linear. The product of each matrix of the batch is sampled apart, with p ~ ||A_i|| and ||B_:,j||: a gradient norm cached
a sample would be one factor for all of its rows, and fall out. The output of a softmax is kept whole: the softmax keeps
it anyway.

Shapes: A (..., M, C), B (..., C, N), k = round(ratio * M) rows and round(ratio * N) columns.
"""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from dsq.stash.codes import exact_form, keep, kept
from dsq.stash.hooks import in_checkpoint
from dsq.stash.interception import form_now
from dsq.stash.table.products import PRODUCT
from dsq.stash.wtacrs.row_samples import RowSampler, index_of, scales_of
from dsq.stash.wtacrs.sampling import budget, probabilities, sample_rows

_PRODUCTS = ("matmul", "__matmul__", "bmm")


class SampledProducts(TorchFunctionMode):
    """While entered, batched products of two tensors that both need a gradient are sampled."""

    def __init__(self, sampler: RowSampler) -> None:
        super().__init__()
        self.sampler = sampler

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if not kwargs and getattr(func, "__name__", "") in _PRODUCTS and _fits(*args) and not in_checkpoint():
            return _SampledMatmul.apply(*args, self.sampler)  # type: ignore[no-untyped-call]
        return func(*args, **(kwargs or {}))


def _fits(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.dim() == b.dim() >= 3
        and a.shape[:-2] == b.shape[:-2]
        and a.shape[-1] == b.shape[-2]
        and a.requires_grad
        and b.requires_grad
        and a.numel() * b.numel() > 0
    )


class _SampledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, sampler: RowSampler) -> Tensor:
        o = a @ b
        a_kC, rows_2k = _keep(a, o.dtype, sampler)
        b_kC, cols_2k = _keep(b.transpose(-2, -1), o.dtype, sampler)
        forms = (None if x is None else exact_form(x) for x in (rows_2k, cols_2k))
        keep(ctx, form_now(a_kC, PRODUCT), form_now(b_kC, PRODUCT), *forms)
        ctx.dtypes = a.dtype, b.dtype
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        a_kC, b_kC, rows_2k, cols_2k = kept(ctx)
        a_dtype, b_dtype = ctx.dtypes
        da = db = None
        if ctx.needs_input_grad[0]:
            do_kM, b_kC = _matching(do.transpose(-2, -1), b_kC, cols_2k)
            da = (do_kM.transpose(-2, -1) @ b_kC.to(do.dtype)).to(a_dtype)
        if ctx.needs_input_grad[1]:
            do_kN, a_kC = _matching(do, a_kC, rows_2k)
            db = (a_kC.to(do.dtype).transpose(-2, -1) @ do_kN).to(b_dtype)
        return da, db, None


def _keep(x: Tensor, dtype: torch.dtype, sampler: RowSampler) -> tuple[Tensor, Tensor | None]:
    """The kept rows of each matrix of ``x`` (..., k, C) and their index; ``x`` itself and None where all are kept."""
    rows = x.shape[-2]
    k = budget(rows, sampler.ratio)
    if k >= rows or type(x.grad_fn).__name__ == "SoftmaxBackward0":
        return x.to(dtype), None
    p_T = probabilities(torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32)))
    rows_k, scale_k = sample_rows(p_T, k, sampler.uniform(x.device, *x.shape[:-2], k))
    kept = _take(x, rows_k).to(dtype)
    index = index_of(rows_k, scale_k)
    sampler.tally.products += 1
    sampler.tally.raw_bytes += x.numel() * dtype.itemsize
    sampler.tally.kept_bytes += kept.nbytes + index.nbytes
    return kept, index


def _matching(do: Tensor, kept: Tensor, index_2k: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of dO that belong to the kept rows, and these with their scales."""
    if index_2k is None:
        return do, kept
    # an overflow in a row that was not drawn must still reach a loss scaler
    scale_k = scales_of(index_2k) + 0 * do.sum(dtype=torch.promote_types(do.dtype, torch.float32))
    return _take(do, index_2k[0].long()), kept * scale_k[..., None]


def _take(x: Tensor, rows_k: Tensor) -> Tensor:
    return x.gather(-2, rows_k[..., None].expand(*rows_k.shape, x.shape[-1]))
