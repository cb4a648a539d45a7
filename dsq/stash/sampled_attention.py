"""nn.MultiheadAttention with sampled projections.

PyTorch's runs its projections through F.linear inside one functional call, past any module that a policy could replace,
so the forward is stated again here, with sampled_linear for the four projections.

Shapes: B samples, L target and S source tokens, E features, H heads, D features a head.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsq.stash.row_samples import Tokens
from dsq.stash.sampled_linear import Site, sampled_linear


class SampledAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention as the policy leaves it; arguments and results are PyTorch's."""

    _wtacrs: Site | None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if self._wtacrs is None or not torch.is_grad_enabled() or (is_causal and attn_mask is None):
            return super().forward(  # without a mask is_causal is an error, and the message PyTorch's
                query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            )
        batched = query.dim() == 3
        if not batched:
            query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        elif not self.batch_first:
            query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)

        q, k, v = self._project(query, key, value)
        if is_causal and key_padding_mask is None and not need_weights:
            mask = None
        else:
            mask, is_causal = _merge(attn_mask, key_padding_mask, q), False
        dropout = self.dropout if self.training else 0.0
        if need_weights:
            scores = (q * self.head_dim**-0.5) @ k.transpose(-2, -1)
            weights = F.dropout((scores if mask is None else scores + mask).softmax(-1), dropout)
            mixed = weights @ v
        else:
            weights = None
            mixed = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal)
        out = self._linear("out_proj", mixed.transpose(1, 2).flatten(2), self.out_proj.weight, self.out_proj.bias)

        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.transpose(0, 1), weights

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """q, k, v as (B, H, L or S, D). Those that read one tensor share one sample of its rows."""
        if self.in_proj_weight is not None:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = [
            self._linear(f"{letter}_proj", x, weight, bias)
            for letter, x, weight, bias in zip("qkv", (query, key, value), matrices, biases, strict=True)
        ]
        return [x.unflatten(2, (self.num_heads, self.head_dim)).transpose(1, 2) for x in projected]

    def _linear(self, name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        site = self._wtacrs
        assert site is not None
        return sampled_linear(x, weight, bias, site.sampler, f"{site.name}.{name}", Tokens(x.shape[:-1], 0))


def _merge(attn_mask: Tensor | None, padding_BS: Tensor | None, q: Tensor) -> Tensor | None:
    """Both masks as one that is added to scores of (B, H, L, S); True in a mask of booleans is -inf."""
    masks = []
    if attn_mask is not None:
        masks.append(
            attn_mask if attn_mask.dim() == 2 else attn_mask.view(q.shape[0], q.shape[1], *attn_mask.shape[1:])
        )
    if padding_BS is not None:
        masks.append(padding_BS.view(q.shape[0], 1, 1, -1))
    added = [
        torch.zeros_like(m, dtype=q.dtype).masked_fill(m, -torch.inf) if m.dtype == torch.bool else m for m in masks
    ]
    return sum(added[1:], added[0]) if added else None
