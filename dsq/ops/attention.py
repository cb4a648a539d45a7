"""Scaled dot-product attention whose two products are quantised (dsq.ops.product).

    S = scale Q0(q) Q0(k)^T + mask      P = dropout(softmax(S))      y = Q0(P) Q0(v)

The softmax is PyTorch's, in floating point, and keeps its own result for its backward, as eager attention does; the
fused kernels keep none. Shape suffixes: L queries, S keys, D features, E features of a value; leading dimensions are
batches and heads.
"""

import math

import torch
from torch import Tensor

from dsq.ops.matmul import offset_seed
from dsq.ops.product import SEEDS, ProductMatMuls, product


def attention(
    q_LD: Tensor,
    k_SD: Tensor,
    v_SE: Tensor,
    matmuls: ProductMatMuls,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    seed: int | None = None,
) -> tuple[Tensor, Tensor]:
    """y (..., L, E) and the weights P (..., L, S): what F.scaled_dot_product_attention says of these arguments.

    ``matmuls``: of both products. ``seed`` None rounds to nearest. A query that attends to nothing gives
    zeros. Raises ValueError where ``is_causal`` and ``attn_mask`` are both given, or shapes do not fit.
    """
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal and attn_mask were both given: give one of them")
    multiply = _grouped if enable_gqa else product
    scores = multiply(q_LD, k_SD.mT, matmuls, seed) * (1 / math.sqrt(q_LD.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = scores.new_zeros(attn_mask.shape).masked_fill_(~attn_mask, -math.inf)
    if attn_mask is not None:
        scores = scores + attn_mask  # which keeps nothing for the backward, where a filled mask would stay
    weights = torch.ops.aten._safe_softmax(scores, -1)
    del scores  # the largest tensor, with the weights
    if dropout_p:
        weights, _ = torch.native_dropout(weights, dropout_p, True)  # on CPUs F.dropout keeps a float a value
    return multiply(weights, v_SE, matmuls, offset_seed(seed, SEEDS)), weights


def _grouped(a_MK: Tensor, b_KN: Tensor, matmuls: ProductMatMuls, seed: int | None) -> Tensor:
    """``product`` of the heads of ``a`` by those of ``b``, each of which serves as many of the former in a row."""
    by_group = a_MK.unflatten(-3, (b_KN.shape[-3], -1))
    return product(by_group, b_KN.unsqueeze(-3), matmuls, seed).flatten(-4, -3)
