"""Modules of every kind that dsq.convert quantizes, each with inputs for it."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("transformers")
from transformers import GptOssConfig, MixtralConfig, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts
from transformers.pytorch_utils import Conv1D

TOKENS, WIDTH, INNER, EXPERTS = 40, 32, 48, 4


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


class Own(nn.Module):
    """Attention as a plain loop's model writes it."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(32, 96)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(query=q, key=k, value=v, is_causal=True).transpose(1, 2).flatten(2)


class Around(nn.Sequential):
    """A module that calls no attention itself."""


class LikeFairseq(nn.Module):
    """fairseq's attention hands its weights to PyTorch's function, unless it is told that dimensions are unusual."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.skip_embed_dim_check = nn.Linear(32, 32), False

    def forward(self, x):
        q = self.q_proj(x) if self.skip_embed_dim_check else F.linear(x, self.q_proj.weight, self.q_proj.bias)
        return torch.bmm(torch.bmm(q, x.transpose(1, 2)).softmax(-1), x)


class Subclass(nn.Linear):
    """A layer as in timm: it casts, and calls the function."""

    def forward(self, x):
        return F.linear(x.float(), self.weight, self.bias)


class Written(nn.Module):
    """Products with two parameters, written in one of several ways."""

    def __init__(self, way, *shapes):
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(shape) / 8) for shape in shapes)
        self.way = way

    def forward(self, x):
        return self.way(self, x)

    def names(self):  # the class whose code has the products: functions of a module are not looked into
        return torch.bmm, torch.einsum, F.linear, F.grouped_mm, self @ self


def with_linear(self, x):
    return F.linear(x, self.a, bias=torch.ones(64)) @ self.b


def from_the_left(self, x):
    return (self.a @ x.mT).mT.matmul(self.b)


def with_einsum(self, x):
    return torch.einsum("hed,bthe->btd", self.b, torch.einsum("btd,dhe->bthe", x, self.a))


def with_bmm(self, x):
    return torch.bmm(torch.bmm(x, self.a), self.b)


def in_a_loop(self, x):
    return sum(F.gelu(x @ a) @ b for a, b in zip(self.a, self.b.unbind(), strict=True))


def grouped(self, x):
    rows = torch.tensor([40, 96], dtype=torch.int32)
    y = F.grouped_mm(F.grouped_mm(x.flatten(0, 1), self.a, offs=rows), self.b, offs=rows)
    return y.mul(2)  # in the backward of grouped_mm PyTorch takes no expanded gradient


def experts(kind, config, **sizes):
    options = config(hidden_size=WIDTH, num_local_experts=EXPERTS, **sizes)
    options._experts_implementation = "grouped_mm"
    net = kind(options)
    for p in net.parameters():
        nn.init.normal_(p, std=0.2)
    return net


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states, and for each token two experts of the first three: the fourth is idle."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    choices = torch.rand(TOKENS, 3, generator=generator).argsort(1)[:, :2]
    return x, choices, torch.rand(TOKENS, 2, generator=generator).requires_grad_()


ROUTED: dict[str, Callable[[], nn.Module]] = {
    "mixtral": lambda: experts(MixtralExperts, MixtralConfig, intermediate_size=INNER),
    "gpt oss": lambda: experts(GptOssExperts, GptOssConfig, intermediate_size=INNER),
    "nemotron": lambda: experts(
        NemotronHExperts, NemotronHConfig, n_routed_experts=EXPERTS, moe_intermediate_size=INNER
    ),
}
OWN: dict[str, Callable[[], nn.Module]] = {
    "linear of a parameter": lambda: Written(with_linear, (64, 32), (64, 32)),
    "from the left": lambda: Written(from_the_left, (64, 32), (64, 32)),
    "einsum": lambda: Written(with_einsum, (32, 4, 16), (4, 16, 32)),
    "bmm": lambda: Written(with_bmm, (2, 32, 64), (2, 64, 32)),
    "in a loop": lambda: Written(in_a_loop, (2, 32, 64), (2, 64, 32)),
    "grouped": lambda: Written(grouped, (2, 32, 64), (2, 64, 32)),
    "own attention": lambda: Around(Own()),
    "fairseq's attention": LikeFairseq,
    "a subclass of a layer": lambda: Subclass(32, 16),
    "linear": lambda: nn.Linear(32, 48),
    "Conv1D": lambda: Conv1D(48, 32),
}
KINDS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, ...]]]] = {
    **{name: (make, lambda: (drawn(2, 48, 32),)) for name, make in OWN.items()},
    **{name: (make, batch) for name, make in ROUTED.items()},
    "attention": (lambda: nn.MultiheadAttention(32, 4), lambda: (drawn(16, 3, 32),) * 3),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True),
        lambda: (drawn(2, 16, 32),),
    ),
    "patches": (lambda: nn.Conv2d(3, 20, (4, 6), stride=(4, 6)), lambda: (drawn(2, 3, 16, 24),)),
    "patches without bias": (lambda: nn.Conv2d(3, 20, (4, 6), (4, 6), bias=False), lambda: (drawn(2, 3, 16, 24),)),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return KINDS[name][0]()
