"""Sampled rows are kept by linear layers and products of two activations.

A linear layer (WTA-CRS, algorithm 1):
    forward    Z  = H W^T + b                             exact; stash k rows of H, their numbers and their scales
    backward   dH = dZ W                                  exact
               db = sum of dZ over tokens                 exact
               dW = sum_t scale_t dZ[row_t]^T H[row_t]    unbiased (sampling.py)

A product of two activations ("TensorMul" of figure 4), A (..., M, C) and B (..., C, N):
    forward    O  = A B                                          exact; stash k rows of A and k columns of B
    backward   dA = sum_t scale_t dO[:, col_t] B[:, col_t]^T     unbiased
               dB = sum_t scale_t A[row_t]^T dO[row_t]           unbiased
Unlike a weight's, the gradients of a product flow on: everything before the product sees their noise, unbiased, as the
backward is linear. The product of each matrix of the batch is sampled apart, with p ~ ||A_i|| and ||B_:,j||: a gradient
norm cached a sample would be one factor for all of its rows, and fall out. The output of a softmax is kept whole: the
softmax keeps it anyway.

Shapes: T tokens (all leading dimensions), K in-features, N out-features, k kept rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsq.stash.codes import Stash, keep, kept
from dsq.stash.controller import RUNNING, SharedByCopies
from dsq.stash.interception import in_checkpoint, stash_now
from dsq.stash.table import Row
from dsq.stash.wtacrs.rows import RowSampler, index_of, norms_of, samples_of, scales_of
from dsq.stash.wtacrs.sampling import budget, probabilities, sample_rows


@dataclass(frozen=True, eq=False)
class Site(SharedByCopies):
    """Where a layer finds its sampler."""

    name: str  #: of the layer, under which its gradient norms are cached
    sampler: RowSampler


class SampledLinear(nn.Linear):
    """nn.Linear as the policy leaves it."""

    plain = nn.Linear
    _wtacrs: Site

    def forward(self, input: Tensor) -> Tensor:  # the name is nn.Linear's
        return sampled_linear(input, self.weight, self.bias, self._wtacrs.sampler, self._wtacrs.name)


def sampled_linear(x: Tensor, weight: Tensor, bias: Tensor | None, sampler: RowSampler, reader: str) -> Tensor:
    """Return ``F.linear`` with an estimated weight gradient; F.linear itself where the weight is frozen or k = T.

    Args:
        x: (..., K); weight: (N, K); bias: (N,) or None. Dtypes, autocast and errors are those of F.linear.
        reader: name of the layer.
    """
    if not torch.is_grad_enabled() or RUNNING.suspended or not weight.requires_grad:
        return F.linear(x, weight, bias)
    rows = x.shape[:-1].numel()
    if rows == 0 or budget(rows, sampler.ratio) >= rows:
        sampler.tally.exact += 1
        return F.linear(x, weight, bias)
    z: Tensor = _SampledLinear.apply(x, weight, bias, sampler, reader)  # type: ignore[no-untyped-call]
    return z


class _SampledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NK: Tensor, bias: Tensor | None, sampler: RowSampler, reader: str) -> Tensor:
        z = F.linear(x, w_NK, bias)
        sample = sampler.sample(x, z.dtype, reader)
        # all through save_for_backward: a checkpoint's recomputation then replaces rows, numbers and scales together
        assert sample.rows is not None
        keep(ctx, w_NK if ctx.needs_input_grad[0] else None, stash_now().code(sample.rows, "linear"), sample.index)
        ctx.sampler, ctx.sample, ctx.reader, ctx.samples = sampler, sample, reader, samples_of(x)
        ctx.dtypes = x.dtype, w_NK.dtype, None if bias is None else bias.dtype
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        w_NK, h_kK, index_2k = kept(ctx)
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        ctx.sample.close()
        dz_TN = dz.reshape(-1, dz.shape[-1])
        dx = dw_NK = db_N = None
        if ctx.needs_input_grad[0]:
            dx = (dz @ w_NK.to(dz.dtype)).to(x_dtype)
        if ctx.needs_input_grad[1]:
            dz_norm_T = norms_of(dz_TN)
            ctx.sampler.record(ctx.sample, ctx.reader, dz_norm_T, ctx.samples)
            # an infinity in a row that was not drawn must still reach a loss scaler: it makes every scale NaN
            scale_k = scales_of(index_2k) + 0 * dz_norm_T.sum()
            # H takes the scale: p_i ~ ||H_i|| evens its rows out, where scaled rows of dZ could leave float16's range
            scaled_kK = (h_kK * scale_k[:, None]).to(dz.dtype)
            dw_NK = (dz_TN.index_select(0, index_2k[0]).t() @ scaled_kK).to(w_dtype)
        if ctx.needs_input_grad[2]:
            db_N = dz_TN.sum(0).to(bias_dtype)
        return dx, dw_NK, db_N, None, None


def sampled_products(sampler: RowSampler) -> dict[Any, Row]:
    """Return the rows that sample batched products of two tensors, if both need a gradient."""

    def row(stash: Stash, input: Any, other: Any) -> Tensor:
        if not _fits(input, other) or in_checkpoint():
            return torch.matmul(input, other)
        return _SampledMatmul.apply(stash, input, other, sampler)  # type: ignore[no-any-return, no-untyped-call]

    return {
        **dict.fromkeys((torch.matmul, Tensor.matmul, Tensor.__matmul__), row),
        **dict.fromkeys((torch.bmm, Tensor.bmm), lambda stash, input, mat2: row(stash, input, mat2)),
    }


def _fits(a: Any, b: Any) -> bool:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor) and a.requires_grad and b.requires_grad):
        return False
    matching = a.dim() == b.dim() >= 3 and a.shape[:-2] == b.shape[:-2] and a.shape[-1] == b.shape[-2]
    return matching and a.numel() * b.numel() > 0


class _SampledMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, stash: Stash, a: Tensor, b: Tensor, sampler: RowSampler) -> Tensor:
        o = a @ b
        a_kC, rows_2k = _keep(a, o.dtype, sampler)
        b_kC, cols_2k = _keep(b.transpose(-2, -1), o.dtype, sampler)
        keep(ctx, stash.code(a_kC, "product"), stash.code(b_kC, "product"), rows_2k, cols_2k)
        ctx.dtypes = a.dtype, b.dtype
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        a_kC, b_kC, rows_2k, cols_2k = kept(ctx)
        a_dtype, b_dtype = ctx.dtypes
        da = db = None
        if ctx.needs_input_grad[1]:
            do_kM, b_kC = _matching(do.transpose(-2, -1), b_kC, cols_2k)
            da = (do_kM.transpose(-2, -1) @ b_kC.to(do.dtype)).to(a_dtype)
        if ctx.needs_input_grad[2]:
            do_kN, a_kC = _matching(do, a_kC, rows_2k)
            db = (a_kC.to(do.dtype).transpose(-2, -1) @ do_kN).to(b_dtype)
        return None, da, db, None


def _keep(x: Tensor, dtype: torch.dtype, sampler: RowSampler) -> tuple[Tensor, Tensor | None]:
    """Return the kept rows of each matrix of ``x`` (..., k, C) and their index; ``x`` itself and None where all are
    kept."""
    rows = x.shape[-2]
    k = budget(rows, sampler.ratio)
    if k >= rows or type(x.grad_fn).__name__ == "SoftmaxBackward0":
        return x.to(dtype), None
    rows_k, scale_k = sample_rows(probabilities(norms_of(x)), k, sampler.uniform(x.device, *x.shape[:-2], k))
    kept = _take(x, rows_k).to(dtype)
    index = index_of(rows_k, scale_k)
    sampler.tally.products += 1
    sampler.count(x.numel() * dtype.itemsize, kept, index)
    return kept, index


def _matching(do: Tensor, kept: Tensor, index_2k: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the rows of dO that belong to the kept rows, and these with their scales."""
    if index_2k is None:
        return do, kept
    # an overflow in a row that was not drawn must still reach a loss scaler
    scale_k = scales_of(index_2k) + 0 * do.sum(dtype=torch.promote_types(do.dtype, torch.float32))
    return _take(do, index_2k[0].long()), kept * scale_k[..., None]


def _take(x: Tensor, rows_k: Tensor) -> Tensor:
    return x.gather(-2, rows_k[..., None].expand(*rows_k.shape, x.shape[-1]))
