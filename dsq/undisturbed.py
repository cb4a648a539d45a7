"""A model run for a look at it, between the updates of a training that must not notice."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from dsq.formats.base import WIDEST
from dsq.stash.controller import APPLIED
from dsq.stash.policy import run_eagerly


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Restore at the end: buffers, random numbers of PyTorch, and the states of stash policies."""
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    states = [
        (module, name, controller.state_dict())
        for module in model.modules()
        for name, controller in module.__dict__.get(APPLIED, {}).items()
    ]
    try:
        with torch.random.fork_rng():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for (
            module,
            name,
            state,
        ) in states:  # as_plain may have made the controller anew
            module.__dict__[APPLIED][name].load_state_dict(state)


@contextmanager
def without_gradients(parameters: list[nn.Parameter]) -> Iterator[None]:
    """Let ``.grad`` begin at None, and restore it at the end. Hooks that follow it, as an optimizer's, do not run.

    The counter of FLOPs cannot see torch.autograd.grad, which FSDP and reentrant checkpoints do not allow either.
    """
    gradients = [p.grad for p in parameters]
    tables = [t for p in parameters if (t := p._post_accumulate_grad_hooks)]
    hooks = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        for p in parameters:
            p.grad = None
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        for table, before in zip(tables, hooks, strict=True):
            table.update(before)


def gradients(model: nn.Module, loss: Callable[[], Tensor | None]) -> dict[str, Tensor]:
    """The gradients of ``loss()`` by parameter. Compiled blocks run eagerly: compiled code draws another dropout."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with undisturbed(model), run_eagerly(), without_gradients(list(parameters.values())):
        start = loss()
        assert start is not None
        start.backward()
        given = {name: p.grad for name, p in parameters.items() if p.grad is not None}
        return {name: g.clone() if g._is_view() else g for name, g in given.items()}  # views of DDP's buckets


@contextmanager
def at_32_bits(layers: list[Any], but_stash: bool = False) -> Iterator[None]:
    """Let converted layers multiply exactly, on stashes as they are if ``but_stash``.

    They go on drawing the seeds of their rounding, so that dropout stays the same.
    """
    before = [layer.quantizers for layer in layers]
    try:
        for layer, q in zip(layers, before, strict=True):
            wide = replace(q, **{name: getattr(q, name).at(WIDEST) for name in ("q0", "q1", "q2", "q3")})
            stashing = replace(wide, q1=q.q1)
            matmuls = stashing.matmuls._replace(input_gradient=wide.matmuls.input_gradient)  # w is no stash
            object.__setattr__(stashing, "matmuls", matmuls)
            layer.quantizers = stashing if but_stash else wide
        yield
    finally:
        for layer, q in zip(layers, before, strict=True):
            layer.quantizers = q
