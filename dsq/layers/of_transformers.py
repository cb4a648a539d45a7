"""Layers of transformers: GPT-2's Conv1D, and attention under the name "dsq" of its registry of attention functions."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import create_position_bias_mask, sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.pytorch_utils import Conv1D as TransformersConv1D

from dsq.linear import layer_linear
from dsq.ops.products import attention
from dsq.quantizers import Quantized

NAME = "dsq"


class Conv1D(Quantized, TransformersConv1D):
    """transformers' ``Conv1D`` quantized as ``dsq.Linear`` is; same parameters, same state dict."""

    original = TransformersConv1D

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self, Quantized):  # unconverted under a wrapper of this function, such as accelerate's
            return type(self).forward(self, x)
        return layer_linear(self, x, self.weight.t(), self.bias)

    def __repr__(self) -> str:  # that of transformers asks for no extra_repr
        return f"{super().__repr__()[:-1]}, {self.extra_repr()})"


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return y (B, L, H, E) and the weights (B, H, L, S), as transformers' registry requires of an attention function.

    The products are quantized at the level of the module's projections; if none is converted, it runs "sdpa".
    """
    projection = next((layer for layer in module.modules() if isinstance(layer, Quantized)), None)
    if projection is None or projection.evaluates_unquantized:
        result: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, position_bias, **options
        )
        return result
    for option in ("softcap", "s_aux"):  # the latter: attention sinks
        if options.get(option) is not None:
            raise ValueError(f"{option} is not supported with attention=True; use DSQConfig(attention=False)")
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = bool(causal and attention_mask is None and query.shape[2] > 1)
    if causal and key.shape[2] > query.shape[2]:  # a static cache that is still empty
        key, value = key[:, :, : query.shape[2]], value[:, :, : query.shape[2]]
        position_bias = None if position_bias is None else position_bias[..., : query.shape[2]]
    if position_bias is not None:
        attention_mask, causal = create_position_bias_mask(position_bias, attention_mask, causal, query, key), False
    quantizers, grouped = projection.quantizers, key.shape[1] != query.shape[1]
    y, weights = attention(
        *(query, key, value, quantizers.activation_matmuls, attention_mask),
        *(dropout, causal, scaling, grouped, quantizers.seed()),
    )
    return y.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attention_forward)
AttentionMaskInterface.register(NAME, sdpa_mask)
