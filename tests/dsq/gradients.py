"""A step of a model under the same random numbers each time: gradients, how far they are from others, what it saves."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def step(model: nn.Module, *inputs: Tensor, run: Callable[..., Any] | None = None) -> list[Tensor | None]:
    """The result, and the gradients of the inputs and of all parameters; ``run``: the model compiled."""
    tensors = (*inputs, *model.parameters())
    for tensor in tensors:
        tensor.grad = None
    torch.manual_seed(1)
    y = (model if run is None else run)(*inputs)
    y = y[0] if isinstance(y, tuple) else y
    y.to(torch.promote_types(y.dtype, torch.float32)).square().sum().backward()
    return [y.detach(), *(tensor.grad for tensor in tensors)]


def same(results: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    """Whether no bit differs; None is the same as None alone."""
    pairs = zip(results, expected, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def gradient(model: nn.Module, *inputs: Tensor, run: Callable[..., Any] | None = None) -> Tensor:
    """The gradient of all parameters, in one vector."""
    step(model, *inputs, run=run)
    return all_gradients(model)


def all_gradients(model: nn.Module) -> Tensor:
    """The gradients that the parameters have now, in one vector."""
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def error(got: Tensor, true: Tensor) -> float:
    """|got - true| / |true|"""
    return float((got - true).norm() / true.norm())


def saving(run: Callable[..., Any], *args: Any) -> tuple[Any, list[Tensor]]:
    """The result of a forward, and each tensor that it saves for its backward."""
    saved_tensors: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved_tensors.append(t) or t, lambda t: t):
        return run(*args), saved_tensors
