"""What the tests of policies compare: the gradient of a step, and how far it is from another."""

import torch
from torch import Tensor, nn


def gradient(model: nn.Module, x: Tensor) -> Tensor:
    """Of all parameters, in one vector; of a step that is always given the same random numbers."""
    torch.manual_seed(1)
    model.zero_grad()
    model(x).float().square().sum().backward()
    return all_gradients(model)


def all_gradients(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(got: Tensor, true: Tensor) -> float:
    """|got - true| / |true|"""
    return float((got - true).norm() / true.norm())
