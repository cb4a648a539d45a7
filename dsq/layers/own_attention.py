"""Modules whose forward multiplies queries by keys itself: those that call ``F.scaled_dot_product_attention``, as plain
loops' models do, and fairseq's attention, which calls ``torch.bmm``.
"""

from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dsq.layers.mixed import Mixed
from dsq.ops.products import attention, product
from dsq.quantizers import Quantised


class OwnAttention(Mixed, nn.Module):
    """Quantises the products of attention that the forward computes, at the level of the module's own projections."""

    def forward(self, *args: Any, **keywords: Any) -> Any:
        layer = next((layer for layer in self.modules() if isinstance(layer, Quantised)), None)
        if layer is None or layer.evaluates_plain:
            return super().forward(*args, **keywords)
        with _Attend(layer):
            return super().forward(*args, **keywords)


class _Attend(TorchFunctionMode):
    def __init__(self, layer: Quantised) -> None:
        super().__init__()
        self.layer = layer

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is torch.bmm:
            return self._multiply(*args, **(kwargs or {}))
        if func is Tensor.unflatten:  # a Python function that a compiler does not trace under a mode
            func = torch.unflatten
        return func(*args, **(kwargs or {}))

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        q = self.layer.quantizers
        return attention(query, key, value, q.products, attn_mask, dropout_p, is_causal, scale, enable_gqa, q.seed())[0]

    def _multiply(self, input: Tensor, mat2: Tensor) -> Tensor:
        q = self.layer.quantizers
        return product(input, mat2, q.products, q.seed())


def calls_attention(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Whether a method of ``kind``, the class of ``module``, names PyTorch's function, or it is fairseq's attention."""
    methods = [method for c in kind.__mro__[: kind.__mro__.index(nn.Module)] for method in vars(c).values()]
    names = {name for method in methods if isinstance(method, FunctionType) for name in method.__code__.co_names}
    return "scaled_dot_product_attention" in names or (hasattr(module, "skip_embed_dim_check") and "bmm" in names)
