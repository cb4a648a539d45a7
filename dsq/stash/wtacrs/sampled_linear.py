"""A linear layer that keeps k of its input's T rows for the weight gradient (WTA-CRS, algorithm 1).

    forward    Z  = H W^T + b                             exact; stash k rows of H, their numbers and their scales
    backward   dH = dZ W                                  exact
               db = sum of dZ over tokens                 exact
               dW = sum_t scale_t dZ[row_t]^T H[row_t]    unbiased (sampling.py)

Shapes: T tokens (all leading dimensions), K in-features, N out-features, k kept rows.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsq.stash.codes import exact_form, keep, kept
from dsq.stash.controller import SharedByCopies
from dsq.stash.interception import form_now
from dsq.stash.table.products import LINEAR
from dsq.stash.wtacrs.row_samples import RowSampler, Tokens, scales_of
from dsq.stash.wtacrs.sampling import budget


@dataclass(frozen=True, eq=False)
class Site(SharedByCopies):
    """Where a layer finds its sampler."""

    name: str  #: of the layer, under which its gradient norms are cached
    sampler: RowSampler
    sample_dim: int


class SampledLinear(nn.Linear):
    """nn.Linear as the policy leaves it."""

    _wtacrs: Site

    def forward(self, input: Tensor) -> Tensor:  # the name is nn.Linear's
        site = self._wtacrs
        tokens = Tokens(input.shape[:-1], site.sample_dim)
        return sampled_linear(input, self.weight, self.bias, site.sampler, site.name, tokens)


def sampled_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, sampler: RowSampler, reader: str, tokens: Tokens
) -> Tensor:
    """``F.linear`` with an estimated weight gradient; F.linear itself where the weight is frozen or k = T.

    Args:
        x: (..., K); weight: (N, K); bias: (N,) or None. Dtypes, autocast and errors are those of F.linear.
        reader: name of the layer.
        tokens: how the rows of ``x`` belong to samples.
    """
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return F.linear(x, weight, bias)
    rows = x.shape[:-1].numel()
    if rows == 0 or budget(rows, sampler.ratio) >= rows:
        sampler.tally.exact += 1
        return F.linear(x, weight, bias)
    z: Tensor = _SampledLinear.apply(x, weight, bias, sampler, reader, tokens)  # type: ignore[no-untyped-call]
    return z


class _SampledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_NK: Tensor, bias: Tensor | None, sampler: RowSampler, reader: str, tokens: Tokens
    ) -> Tensor:
        z = F.linear(x, w_NK, bias)
        sample = sampler.sample(x, z.dtype, reader, tokens)
        # all through save_for_backward: a checkpoint's recomputation then replaces rows, numbers and scales together
        assert sample.rows is not None
        assert sample.index is not None
        w = exact_form(w_NK) if ctx.needs_input_grad[0] else None
        keep(ctx, w, form_now(sample.rows, LINEAR), exact_form(sample.index))
        ctx.sampler, ctx.sample, ctx.reader, ctx.tokens = sampler, sample, reader, tokens
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
            dz_norm_T = torch.linalg.vector_norm(dz_TN, dim=1, dtype=torch.promote_types(dz.dtype, torch.float32))
            ctx.sampler.record(ctx.sample, ctx.reader, dz_norm_T, ctx.tokens)
            # an infinity in a row that was not drawn must still reach a loss scaler: it makes every scale NaN
            scale_k = scales_of(index_2k) + 0 * dz_norm_T.sum()
            # H takes the scale: p_i ~ ||H_i|| evens its rows out, where scaled rows of dZ could leave float16's range
            scaled_kK = (h_kK * scale_k[:, None]).to(dz.dtype)
            dw_NK = (dz_TN.index_select(0, index_2k[0]).t() @ scaled_kK).to(w_dtype)
        if ctx.needs_input_grad[2]:
            db_N = dz_TN.sum(0).to(bias_dtype)
        return dx, dw_NK, db_N, None, None, None
