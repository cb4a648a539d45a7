"""Scaled dot-product attention whose two products are quantised (dsq.ops.product).

    S = scale Q0(q) Q0(k)^T + mask      P = dropout(softmax(S))      y = Q0(P) Q0(v)

The softmax is PyTorch's, in floating point, and keeps its own result for its backward, as eager attention does; the
fused kernels keep none. Shape suffixes: L queries, S keys, D features, E features of a value; leading dimensions are
batches and heads.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from dsq.ops.product import ProductMatMuls, product


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
    if enable_gqa:
        groups = q_LD.shape[-3] // k_SD.shape[-3]
        k_SD, v_SE = (x.repeat_interleave(groups, -3) for x in (k_SD, v_SE))
    leading = torch.broadcast_shapes(q_LD.shape[:-2], k_SD.shape[:-2], v_SE.shape[:-2])
    q_LD, k_SD, v_SE = (x.expand(*leading, *x.shape[-2:]) for x in (q_LD, k_SD, v_SE))
    scores = product(q_LD, k_SD.mT, matmuls, seed) * (1 / math.sqrt(q_LD.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    weights = F.dropout(torch.ops.aten._safe_softmax(scores, -1), dropout_p)
    return product(weights, v_SE, matmuls, None if seed is None else seed + 8), weights
