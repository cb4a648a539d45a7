"""``nn.MultiheadAttention`` with quantized projections; PyTorch's multiplies by them without calling a module."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from dsq.linear import Linear, layer_linear
from dsq.ops.products import attention
from dsq.quantizers import Quantized


class OutProjection(Linear):
    """``out_proj`` of an attention, which is called here; PyTorch's attention reads its weight."""

    original = NonDynamicallyQuantizableLinear


class MultiheadAttention(Quantized, nn.MultiheadAttention):
    """``nn.MultiheadAttention`` with quantized projections; same parameters, state dict, masks and results.

    In self-attention, one product with ``in_proj_weight`` computes all three projections. PyTorch's fused evaluation
    path is never taken. Shape suffixes: L queries, S keys, B batch, E features, H heads, D a head.
    """

    original = nn.MultiheadAttention

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
        """Return the result of nn.MultiheadAttention. Raises ValueError for ``is_causal`` without ``attn_mask``."""
        if not isinstance(self, Quantized):  # unconverted under a wrapper of this function, such as accelerate's
            options = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            return type(self).forward(self, query, key, value, *options)
        if is_causal and attn_mask is None:
            raise ValueError("is_causal is a hint about attn_mask: give attn_mask too")
        batched: bool = F._mha_shape_check(  # type: ignore[attr-defined]
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        q, k, v = self._projected(query, key, value)
        if not batched:
            q, k, v = (x.unsqueeze(0) for x in (q, k, v))
        elif not self.batch_first:
            q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        dropped_mask = is_causal and key_padding_mask is None and not need_weights
        mask = None if dropped_mask else self._mask(q, k, attn_mask, key_padding_mask)
        q_BHLD = self._heads(q)
        k_BHSD, v_BHSD = self._heads(self._appended(k, self.bias_k)), self._heads(self._appended(v, self.bias_v))
        y_BHLD, weights = self._attend(q_BHLD, k_BHSD, v_BHSD, mask, dropped_mask, need_weights)
        # as PyTorch's result lies in memory: a view of it may be asked for, and a dropout draws in that order
        y = self.out_proj(y_BHLD.permute(2, 0, 1, 3).flatten(2))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            return y.squeeze(1), None if weights is None else weights.squeeze(0)
        return y.transpose(0, 1) if self.batch_first else y, weights

    def _projected(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self._qkv_same_embed_dim and query is key and key is value:
            return list(layer_linear(self, query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1))
        if self._qkv_same_embed_dim:
            weights = self.in_proj_weight.chunk(3)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [layer_linear(self, x, w, b) for x, w, b in zip((query, key, value), weights, biases, strict=True)]

    def _appended(self, x_BSE: Tensor, bias: Tensor | None) -> Tensor:
        """Append to keys or values those of ``add_bias_kv`` and ``add_zero_attn``."""
        if bias is not None:
            x_BSE = torch.cat([x_BSE, bias.expand(x_BSE.shape[0], 1, -1)], 1)
        return F.pad(x_BSE, (0, 0, 0, 1)) if self.add_zero_attn else x_BSE

    def _heads(self, x_BLE: Tensor) -> Tensor:
        return x_BLE.reshape(*x_BLE.shape[:2], self.num_heads, self.head_dim).transpose(1, 2)

    def _mask(
        self, q_BLE: Tensor, k_BSE: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None
    ) -> Tensor | None:
        """Return the sum of both masks, which is added to the scores, also for the appended keys."""
        batch, dtype, mask = q_BLE.shape[0], q_BLE.dtype, None
        if attn_mask is not None:
            mask = F._canonical_mask(attn_mask, "attn_mask", None, "", dtype, False)
            assert mask is not None
            mask = mask if mask.dim() == 2 else mask.view(batch, self.num_heads, *mask.shape[1:])
        if key_padding_mask is not None:
            other = F._none_or_dtype(attn_mask)
            padding = F._canonical_mask(key_padding_mask, "key_padding_mask", other, "attn_mask", dtype)
            assert padding is not None
            padding = padding.view(batch, 1, 1, k_BSE.shape[1])
            mask = padding if mask is None else mask + padding
        appended = (self.bias_k is not None) + self.add_zero_attn
        return mask if mask is None or not appended else F.pad(mask, (0, appended))

    def _attend(
        self, q_BHLD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, mask: Tensor | None, causal: bool, need_weights: bool
    ) -> tuple[Tensor, Tensor | None]:
        dropout = self.dropout if self.training else 0.0
        if self.conversion.get("attention", False) and not self.evaluates_unquantized:
            matmuls, seed = self.quantizers.activation_matmuls, self.quantizers.seed()
            y, weights = attention(q_BHLD, k_BHSD, v_BHSD, matmuls, mask, dropout, causal, seed=seed)
            return y, weights if need_weights else None
        if not need_weights:
            return F.scaled_dot_product_attention(q_BHLD, k_BHSD, v_BHSD, mask, dropout, causal), None
        scores = (q_BHLD * math.sqrt(1.0 / self.head_dim)) @ k_BHSD.mT
        weights = F.dropout(F.softmax(scores if mask is None else scores + mask, -1), dropout)
        return weights @ v_BHSD, weights
