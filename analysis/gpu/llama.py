"""Llama 3, whose block is wider, gated and in bfloat16: the second model of the GPU estimates."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LlamaAttention(nn.Module):
    """Llama's causal attention, x (B, T, D) -> (B, T, D): rotary positions, four heads to one of keys."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.heads, self.kv_heads = heads, heads // 4
        linear = partial(nn.Linear, width, bias=False, dtype=dtype)
        self.q, self.k, self.v = linear(width), linear(width // 4), linear(width // 4)
        self.out = linear(width)

    def forward(self, x_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        q_BHTd, k_BKTd, v_BKTd = (
            linear(x_BTD).unflatten(-1, (heads, -1)).transpose(1, 2)
            for linear, heads in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads))
        )
        q_BHTd, k_BKTd = (_rotated(x, cos_Td, sin_Td) for x in (q_BHTd, k_BKTd))
        k_BHTd, v_BHTd = (x.repeat_interleave(self.heads // self.kv_heads, 1) for x in (k_BKTd, v_BKTd))
        y_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, is_causal=True)
        return self.out(y_BHTd.transpose(1, 2).flatten(2))


def _rotated(x: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return x * cos_Td + torch.cat((-second, first), -1) * sin_Td


class LlamaBlock(nn.Module):
    """Block of Llama 3: x + attention(norm(x)), then x + down(silu(gate(norm(x))) * up(norm(x)))."""

    def __init__(self, width: int, heads: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(width, 1e-5, dtype=dtype) for _ in range(2))
        self.attention = LlamaAttention(width, heads, dtype)
        ffn, linear = width * 7 // 2, partial(nn.Linear, bias=False, dtype=dtype)
        self.gate, self.up, self.down = linear(width, ffn), linear(width, ffn), linear(ffn, width)

    def forward(self, x_BTD: Tensor, cos_Td: Tensor, sin_Td: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD), cos_Td, sin_Td)
        y_BTD = self.norm2(x_BTD)
        return x_BTD + self.down(F.silu(self.gate(y_BTD)) * self.up(y_BTD))


class Llama(nn.Module):
    """Llama 3 with bfloat16 parameters, of the 8B's proportions: a feed-forward 3.5 times as wide, four heads to one of
    keys (Grattafiori et al. 2024, table 3). Called as ``GPT`` is."""

    cos: Tensor
    sin: Tensor

    def __init__(self, vocabulary: int, context: int, width: int, blocks: int, heads: int, dropout: float) -> None:
        super().__init__()
        assert dropout == 0, "Llama has no dropout"
        dtype = torch.bfloat16
        self.tokens = nn.Embedding(vocabulary, width, dtype=dtype)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, dtype) for _ in range(blocks))
        self.norm = nn.RMSNorm(width, 1e-5, dtype=dtype)
        self.head = nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        frequencies_d = 500_000.0 ** -torch.arange(0, 1, 2 * heads / width)
        angles_Td = torch.outer(torch.arange(context).float(), torch.cat((frequencies_d, frequencies_d)))
        self.register_buffer("cos", angles_Td.cos().to(dtype), persistent=False)
        self.register_buffer("sin", angles_Td.sin().to(dtype), persistent=False)
        self.around: Callable[..., Tensor] | None = None

    def forward(self, tokens_BT: Tensor, logits: bool = True) -> Tensor:
        x_BTD, tokens = self.tokens(tokens_BT), tokens_BT.shape[1]
        for block in self.blocks:
            inputs = x_BTD, self.cos[:tokens], self.sin[:tokens]
            x_BTD = block(*inputs) if self.around is None else self.around(block, *inputs)
        hidden_BTD = self.norm(x_BTD)
        return self.head(hidden_BTD) if logits else hidden_BTD
