"""What the tests of gact share: two small models, a step of a plain loop, and a report's average."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsq import stash
from tests.dsq.gradients import all_gradients


class Sensitive(nn.Module):
    """Four layers; the input of the third one's activation matters to the gradient far more than the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c = (F.gelu(layer(x)) for layer in self.layers[:-1])
        return self.layers[-1](a + b + 30 * c)


class AttentionBlock(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(32), nn.LayerNorm(32)
        self.attention = nn.MultiheadAttention(32, 4, dropout, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(32, 64), nn.Linear(64, 32), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.drop(self.attention(y, y, y)[0])
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.blocks = nn.ModuleList(AttentionBlock(dropout) for _ in range(2))
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


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
