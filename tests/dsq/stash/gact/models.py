"""What the tests of gact share: two small models, a step of a plain loop, and a report's average."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.models import encoder
from dsq import stash
from tests.dsq.gradients import all_gradients
from tests.dsq.stash.every_policy import SelfAttention


class Sensitive(nn.Module):
    """Four layers; the input of the third one's activation matters to the gradient far more than the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (F.gelu(layer(x)) for layer in self.layers[:-1])
        return self.layers[-1](a + b + 30 * c)


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 32), nn.Linear(32, 5)
        self.blocks = encoder(2, 32, 4, 64, dropout)[:2]
        for block in self.blocks:
            block.attention = SelfAttention(32, 4, dropout)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)).mean(1))


def make(kind: type[nn.Module], *args: float) -> nn.Module:
    torch.manual_seed(1)
    return kind(*args)


def rows(seed: int = 0, count: int = 128) -> Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(seed))


def tokens(seed: int = 0, length: int = 12) -> Tensor:
    return torch.randint(50, (4, length), generator=torch.Generator().manual_seed(seed))


def step(model: nn.Module, x: Tensor) -> Tensor:
    """One step of a plain loop; the gradient of the parameters."""
    model.zero_grad()
    out = model(x)
    weights = torch.linspace(-1, 1, out.numel()).view(out.shape)
    (out * weights).sum().backward()
    return all_gradients(model).double()


def bits_used(report: stash.Summary) -> float:
    return float(report.details[0].split()[0])
