"""The one table of small models that are measured: an encoder, a GPT and a classifier of it, a ResNet-20. All have
random weights. ``attach`` puts a setup on one by its name.

A name has parts with " + " between them, in the order of applying. A part is

    [4,4,4,8] WORDS     dsq.convert; words: "all" (every other saved tensor packed too), a format, "stochastic",
                        "float32" (its products in float32), "tied" (also a tied output projection), "headless" (the
                        layer called head is skipped)
    bfp 4, snvint 4     policy bfp, that format
    gact 4              also "gact 4 uniform", with uniform bits
    mesa                also "selective", "checkpoint SEGMENTS", "wtacrs 0.3"
    around bfp 4        a GPT's blocks are called with a packed checkpoint of that format; "around checkpoint": plain
    bf16                the model itself is cast
    float8              torchao's float8 training of all linear layers but the head
    compiled            the model's blocks, by torch.compile; after a policy by dsq.compile, and with the word
                        "recomputing" with all products of normalized values recomputed
    fp32, plain, autocast, bf16 autocast, fused    nothing: the caller's contexts
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dsq
from dsq import recipes
from dsq.formats import NAMED, format_class
from dsq.layers.blocks import block_lists


class Attention(nn.Module):
    """Multi-head self-attention, x (B, T, D) -> (B, T, D); written out, or PyTorch's fused one (``sdpa``).

    ``causal``: with ``sdpa``, no position sees a later one.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0, sdpa: bool = False, causal: bool = False):
        super().__init__()
        assert sdpa or not causal, "the attention that is written out has no mask"
        self.heads, self.sdpa, self.causal = heads, sdpa, causal
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        q_BHTd, k_BHTd, v_BHTd = (
            linear(x_BTD).unflatten(-1, (self.heads, -1)).transpose(1, 2) for linear in (self.q, self.k, self.v)
        )
        if self.sdpa:
            rate = self.dropout.p if self.training else 0.0
            y_BHTd = F.scaled_dot_product_attention(q_BHTd, k_BHTd, v_BHTd, dropout_p=rate, is_causal=self.causal)
        else:
            scores_BHTT = q_BHTd @ k_BHTd.transpose(-1, -2) * q_BHTd.size(-1) ** -0.5
            y_BHTd = self.dropout(scores_BHTT.softmax(-1)) @ v_BHTd
        return self.out(y_BHTd.transpose(1, 2).flatten(2))


class EncoderBlock(nn.Module):
    """Pre-LN encoder block: x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(
        self, width: int, heads: int, ffn: int, dropout: float = 0.0, sdpa: bool = False, causal: bool = False
    ):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout, sdpa, causal)
        self.fc1, self.fc2 = nn.Linear(width, ffn), nn.Linear(ffn, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.attention(self.norm1(x_BTD)))
        return x_BTD + self.dropout(self.fc2(F.gelu(self.fc1(self.norm2(x_BTD)))))


def encoder(
    blocks: int = 6,
    width: int = 512,
    heads: int = 8,
    ffn: int = 2048,
    dropout: float = 0.0,
    sdpa: bool = False,
    causal: bool = False,
) -> nn.Sequential:
    """Pre-LN encoder blocks with GELU, and the final norm."""
    stack = (EncoderBlock(width, heads, ffn, dropout, sdpa, causal) for _ in range(blocks))
    return nn.Sequential(*stack, nn.LayerNorm(width))


class GPT(nn.Module):
    """Tokens (B, T) -> logits (B, T, vocabulary) of the next; the output's weight is the embedding's if ``tied``.

    Without ``logits`` the result is the output layer's input, (B, T, width), for a loss in chunks.

    ``around(block, x)`` calls a block, for checkpoints; None: the block is called as it is.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        width: int,
        blocks: int,
        heads: int,
        dropout: float,
        tied: bool = True,
        around: Callable[..., Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.encoder = encoder(blocks, width, heads, 4 * width, dropout, sdpa=True, causal=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)
        self.around = around

    def _hidden(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = self.tokens(tokens_BT) + self.places.weight[: tokens_BT.shape[1]]
        if self.around is None:
            return self.encoder(x_BTD)
        *blocks, norm = self.encoder
        for block in blocks:
            x_BTD = self.around(block, x_BTD)
        return norm(x_BTD)

    def forward(self, tokens_BT: Tensor, logits: bool = True) -> Tensor:
        hidden_BTD = self._hidden(tokens_BT)
        return self.head(hidden_BTD) if logits else hidden_BTD


class Classifier(nn.Module):
    """Words (B, T) of at most LONGEST -> scores (B, classes)."""

    LONGEST = 64

    def __init__(self, words: int, classes: int, width: int, blocks: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(self.LONGEST, width)
        self.drop = nn.Dropout(0.1)
        self.encoder = encoder(blocks, width, heads=4, ffn=4 * width, dropout=0.1)
        self.head = nn.Linear(width, classes)

    def forward(self, words_BT: Tensor) -> Tensor:
        x_BTD = self.words(words_BT) + self.places.weight[: words_BT.shape[1]]
        return self.head(self.encoder(self.drop(x_BTD)).mean(1))


class BasicBlock(nn.Module):
    """ResNet's block of two 3x3 convolutions (He et al. 2015), with a 1x1 shortcut where the shape changes."""

    def __init__(self, inner: int, outer: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outer)
        self.conv2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outer)
        self.relu = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inner != outer:
            self.shortcut = nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.shortcut(x))


def resnet20(widths: tuple[int, int, int] = (32, 64, 128), classes: int = 10, channels: int = 3) -> nn.Sequential:
    """CIFAR's ResNet-20: a 3x3 stem, three stages of three blocks, average pooling, a linear classifier."""
    stem = [nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False), nn.BatchNorm2d(widths[0]), nn.ReLU()]
    stages, inner = [], widths[0]
    for stage, width in enumerate(widths):
        for block in range(3):
            stages.append(BasicBlock(inner, width, 2 if stage > 0 and block == 0 else 1))
            inner = width
    return nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))


# ---- what a setup's name puts on a model

_CONFIG: dict[str, dict[str, Any]] = {
    "all": {"stash": "all"},
    "stochastic": {"rounding": "stochastic"},
    "float32": {"gemm": "float32"},
    "tied": {"tied": True},
    "attention": {"attention": True},
    "headless": {"exclude": "head"},
    **{name: {"format": name} for name in ("bfp", "snvint", "fixed")},
}
_NOTHING = ("plain", "fp32", "autocast", "bf16 autocast", "fused")


def attach(model: nn.Module, name: str) -> list[Any]:
    """Put the setup of this name on a model, in place. Returns the controllers of its policies."""
    controllers: list[Any] = []
    for part in name.split(" + "):
        first, *words = part.split()
        if first in recipes.names():
            first = recipes.recipe(first).operands  # of every layer, those of plain ends too
        if first.startswith("[") or first in NAMED:
            options = {key: value for word in words for key, value in _CONFIG[word].items()}
            dsq.convert(model, dsq.DSQConfig(**{"levels": first, "stash": "linears"} | options))
        elif first == "around":
            around: Any = partial(checkpoint, use_reentrant=False)
            if words != ["checkpoint"]:
                around = partial(dsq.stash.packed_checkpoint, fmt=format_class(words[0])(int(words[1])))
            model.around = around
        elif part == "bf16":
            model.bfloat16()
        elif part == "float8":
            from torchao.float8 import convert_to_float8_training

            convert_to_float8_training(model, module_filter_fn=lambda _, name: "head" not in name)
        elif first == "compiled" and controllers:
            dsq.compile(model, recomputed_products=float("recomputing" in words))
        elif part == "compiled":
            for block in chain.from_iterable(block_lists(model)):
                block.compile(fullgraph=True)
        elif part not in _NOTHING:
            policy, options = _policy(first, words)
            controllers.append(dsq.stash.apply(model, policy, **options))
    return controllers


def _policy(first: str, words: list[str]) -> tuple[str, dict[str, Any]]:
    if first in ("bfp", "snvint"):
        return "bfp", {"bits": int(words[0]), "format": first}
    if first == "wtacrs":
        return "wtacrs", {"ratio": float(words[0])}
    if first == "checkpoint" and words:
        return first, {"segments": words[0]}
    if first == "gact" and words:
        return "gact", {"bits": int(words[0])} | ({"adapt_interval": None} if words[1:] else {})
    return first, {}
