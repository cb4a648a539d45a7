"""Modules whose forward calls ``F.scaled_dot_product_attention`` itself, as plain loops' models do."""

from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dsq.layers.mixed import Mixed
from dsq.linear import Quantised


class OwnAttention(Mixed, nn.Module):
    """Quantises the products of the attention that the forward calls, at the level of the module's own projections."""

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
        return func(*args, **(kwargs or {}))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return self.layer.attend(query, key, value, *args, **keywords)[0]


def calls_attention(kind: type[nn.Module]) -> bool:
    """Whether a method of ``kind`` names PyTorch's function."""
    methods = [method for c in kind.__mro__[: kind.__mro__.index(nn.Module)] for method in vars(c).values()]
    return any(
        "scaled_dot_product_attention" in method.__code__.co_names
        for method in methods
        if isinstance(method, FunctionType)
    )
