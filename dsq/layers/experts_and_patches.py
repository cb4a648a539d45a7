"""Linear layers applied to parts of their input: experts to the tokens routed to them, convolutions to patches."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dsq.layers import Mixed
from dsq.linear import layer_linear
from dsq.quantizers import Quantized


class Experts(Mixed, Quantized, nn.Module):
    """The base of every quantized class of experts, with the forward that transformers' ExpertsInterface requires.

    Shape suffixes: T tokens, S tokens times the experts that each goes to, E experts, K in-features, N out-features.
    """

    # set by transformers' decorator
    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    _apply_gate: Callable[[Tensor], Tensor]
    # set by the class itself
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return (T, K) for hidden states (T, K); the experts of each token and their weights are both (T, S / T)."""
        if not isinstance(self, Quantized):  # unconverted under a wrapper of this function, such as accelerate's
            return type(self).forward(self, hidden_states, top_k_index, top_k_weights)
        experts_S, order_S = top_k_index.flatten().sort(stable=True)
        tokens = experts_S.bincount(minlength=self.num_experts)[: self.num_experts].tolist()
        order_S = order_S[: sum(tokens)]  # under expert parallelism, later ones belong to other ranks
        x = self._products(
            "gate_up_proj" if self.has_gate else "up_proj", hidden_states[order_S // top_k_index.shape[1]], tokens
        )
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        y = self._products("down_proj", x, tokens)
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        y = y * top_k_weights.flatten()[order_S, None]
        y = y.new_zeros(top_k_index.numel(), y.shape[1]).index_put_((order_S,), y)  # index_copy_ would save y
        return y.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def _products(self, name: str, x_SK: Tensor, tokens: list[int]) -> Tensor:
        """Return y (S, N): the tokens, sorted by expert, times each expert's matrix of the parameter ``name``."""
        weights: Tensor = getattr(self, name)
        matrices_NK = (weights.mT if self.is_transposed else weights).unbind()
        biases_N = getattr(self, f"{name}_bias").unbind() if self.has_bias else [None] * len(tokens)
        operands = zip(x_SK.split(tokens), matrices_NK, biases_N, strict=True)
        return torch.cat([layer_linear(self, x, w_NK, bias_N) for x, w_NK, bias_N in operands])


def is_experts(module: nn.Module) -> bool:
    """Return whether transformers' decorator marked the class of ``module`` as experts."""
    return {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed"} <= vars(module).keys()


class PatchConv2d(Quantized, nn.Conv2d):
    """``nn.Conv2d`` of adjacent, non-overlapping windows, quantized as ``dsq.Linear`` is.

    Raises ValueError for an input of other channels, or smaller than a patch.

    A 1 x 1 map, as in squeeze-and-excitation, is not quantized: its few products scale whole maps, all of whose places
    would share one rounding error. A third of the gradient's error in MobileNetV3 was theirs, two fifths in ReXNet.

    Shape suffixes: B batch, C channels, H and W patches down and across, h and w pixels of a patch, N out-channels.
    """

    original = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        if not isinstance(self, Quantized):  # unconverted under a wrapper of this function, such as accelerate's
            return type(self).forward(self, input)
        h, w = self.kernel_size
        x = input if input.dim() == 4 else input[None]
        if x.dim() != 4 or x.shape[1] != self.in_channels or x.shape[2] < h or x.shape[3] < w:
            accepted = f"(B, {self.in_channels}, at least {h}, at least {w}), with or without B"
            raise ValueError(f"input must be {accepted}, got {tuple(input.shape)}")
        if (h, w) == x.shape[2:] == (1, 1):
            return super().forward(input)
        rows, columns = x.shape[2] // h, x.shape[3] // w
        x = x[:, :, : rows * h, : columns * w].unflatten(3, (columns, w)).unflatten(2, (rows, h))  # (B, C, H, h, W, w)
        y_BHWN = layer_linear(self, x.permute(0, 2, 4, 1, 3, 5).flatten(3), self.weight.flatten(1), self.bias)
        y_BNHW = y_BHWN.permute(0, 3, 1, 2)
        if x.is_contiguous():  # the layout of nn.Conv2d's result, which models may view
            y_BNHW = y_BNHW.contiguous()
        return y_BNHW if input.dim() == 4 else y_BNHW[0]
