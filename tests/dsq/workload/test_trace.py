"""Tracing a live model keeps no result until its end."""

import weakref

import torch
from torch import nn

import dsq
from dsq.workload import trace


def test_nothing_of_the_forward_stays_until_its_end():
    """fairseq's plugin traces in the training process, whose peak a packed stash is to lower."""
    results, alive = [], []

    def look(module, inputs, y):
        results.append(weakref.ref(y))
        alive.append(sum(it() is not None for it in results))

    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)) for _ in range(6)))
    dsq.convert(model, dsq.DSQConfig(stash="all"))
    for module in model.modules():
        if not list(module.children()):
            module.register_forward_hook(look)
    trace(model, torch.randn(32, 8))
    assert len(results) == 18
    assert max(alive) <= 3  # what a block and a layer of it read, and what that makes
