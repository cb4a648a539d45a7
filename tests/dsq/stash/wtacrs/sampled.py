"""What the tests of wtacrs share: models, their gradients, and a test of bias."""

import pytest
import torch
from torch import Tensor, nn


class Attention(nn.Module):
    """q, k and v read one input; tanh makes it die with the forward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return self.o(torch.relu(self.q(x) * self.k(x) + self.v(x)))


def attention(seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    return Attention()


def tokens(seed: int = 1, *lead: int) -> Tensor:
    """Tokens of very different sizes, as activations are."""
    g = torch.Generator().manual_seed(seed)
    lead = lead or (8, 12)
    return torch.randn(*lead, 16, generator=g) * torch.rand(*lead, 1, generator=g).mul(3).exp() * 0.1


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of a weighted sum, whose dZ depends on no sampling."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    (out * loss_weights(out)).sum().backward()
    return {"input": x.grad, **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def loss_weights(out: Tensor) -> Tensor:
    return 1 + 0.5 * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))


def saved(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Tensors that reach a saved-tensor hook in a forward, parameters and repeated storages left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            seen.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    del out
    return list(seen.values())


def check_unbiased(estimates: list[Tensor], exact: Tensor, tolerance: float) -> None:
    """The mean estimate's projection on the exact gradient is 1, and draws enough that a miss would show."""
    projections = torch.stack([(e * exact).sum() / exact.square().sum() for e in estimates])
    assert projections.std().item() / len(estimates) ** 0.5 < tolerance / 2, "too few draws for this tolerance"
    assert projections.mean().item() == pytest.approx(1, abs=tolerance)
