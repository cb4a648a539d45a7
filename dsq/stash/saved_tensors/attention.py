"""Attention calls taken apart into matmul, softmax and matmul, for a policy that watches those operations."""

import math
from types import FunctionType

import torch
from torch import Tensor
from torch.nn import functional as F


def own_body(func: FunctionType) -> FunctionType:
    """A function of torch.nn.functional that runs its own lines under a TorchFunctionMode.

    As it is, it would hand itself to the mode again. The copy differs in one name: the check for that always says no.
    """
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q K^T scale + mask) V with the arguments of torch's function; rows without any key give 0."""
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    if is_causal:
        if attn_mask is not None:
            raise RuntimeError("scaled_dot_product_attention: give attn_mask or is_causal=True, not both")
        allowed = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    # scaled before the product: fp16 scores would overflow
    query = query * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    scores = torch.matmul(query, key.transpose(-2, -1))
    dead = None
    if is_causal:
        scores = scores.masked_fill(~allowed, -math.inf)
    elif attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
        dead = scores.isneginf().all(-1, keepdim=True)
        dead = dead if dead.any() else None
    if dead is None:
        weights = torch.softmax(scores, -1)
    else:
        weights = torch.softmax(scores.masked_fill(dead, 0.0), -1).masked_fill(dead, 0.0)
    return torch.matmul(F.dropout(weights, dropout_p), value)
