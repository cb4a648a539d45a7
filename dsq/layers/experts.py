"""Experts of the mixtures in transformers: 3-D parameters, of which each expert multiplies the tokens routed to it.

Each expert's two products are those of ``dsq.Linear`` over its own tokens, so no box of the backward crosses experts.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dsq.layers.mixed import Mixed
from dsq.linear import multiply
from dsq.quantizers import Quantised


class Experts(Mixed, Quantised, nn.Module):
    """What every quantised class of experts has: the forward that transformers' ExpertsInterface asks for.

    Shape suffixes: T tokens, S tokens times the experts that each goes to, E experts, K in-features, N out-features.
    """

    # what transformers' decorator says of a class of experts
    num_experts: int
    has_gate: bool
    has_bias: bool
    has_post_expert_norm: bool
    is_transposed: bool
    _apply_gate: Callable[[Tensor], Tensor]
    # what the class makes itself
    act_fn: Callable[[Tensor], Tensor]
    post_expert_norm: Callable[[Tensor], Tensor]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, K) of hidden states (T, K), and of the experts of each token and their weights, both (T, S / T)."""
        experts_S, order_S = top_k_index.flatten().sort(stable=True)
        tokens = experts_S.bincount(minlength=self.num_experts)[: self.num_experts].tolist()
        order_S = order_S[: sum(tokens)]  # under expert parallelism, what comes after is for experts of other ranks
        x = self._products(
            "gate_up_proj" if self.has_gate else "up_proj", hidden_states[order_S // top_k_index.shape[1]], tokens
        )
        x = self._apply_gate(x) if self.has_gate else self.act_fn(x)
        y = self._products("down_proj", x, tokens)
        if self.has_post_expert_norm:
            y = self.post_expert_norm(y)
        y = y * top_k_weights.flatten()[order_S, None]
        y = y.new_zeros(top_k_index.numel(), y.shape[1]).index_put_((order_S,), y)  # index_copy_ would keep y
        return y.view(*top_k_index.shape, -1).sum(1).to(hidden_states.dtype)

    def _products(self, name: str, x_SK: Tensor, tokens: list[int]) -> Tensor:
        """y (S, N): each expert's tokens, which lie together, by its matrix of the parameter ``name``."""
        weights: Tensor = getattr(self, name)
        matrices_NK = (weights.mT if self.is_transposed else weights).unbind()
        biases_N = getattr(self, f"{name}_bias").unbind() if self.has_bias else [None] * len(tokens)
        each = zip(x_SK.split(tokens), matrices_NK, biases_N, strict=True)
        return torch.cat([multiply(self, x, w_NK, bias_N) for x, w_NK, bias_N in each])


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' decorator made the class of ``module`` one of experts."""
    return {"has_gate", "has_bias", "has_post_expert_norm", "is_transposed"} <= vars(module).keys()
