"""A backend that divides graphs into forward and backward as Inductor does, passes and all, but runs them operation by
operation, without its C++ compiler."""

import torch
import torch._inductor.compile_fx
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.compilers import nop
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.nn import functional as F

from dsq.stash.graphs.partitioner import PackedPartitioner
from tests.dsq.gradients import gradient

X = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))


def _partition(gm, inputs, **kwargs):
    with V.set_fake_mode(detect_fake_mode(inputs)):
        return torch._inductor.compile_fx.partition_fn(gm, inputs, **kwargs)


_DIVIDED = aot_autograd(fw_compiler=nop, partition_fn=_partition, decompositions=select_decomp_table())


def divided(gm, inputs, options=None):
    with config.patch(options or {}):
        return _DIVIDED(gm, inputs)


def packed(bits, products=0.0, budget=None):
    return PackedPartitioner(lambda: bits, products, budget)


def compiled_gradient(model, partitioner=None, x=X, backend=divided):
    """The gradient of a model that is one graph."""
    torch.compiler.reset()
    options = {"custom_partitioner_fn": partitioner}
    return gradient(model, x, run=torch.compile(model, backend=backend, fullgraph=True, options=options))


class Gated(nn.Module):
    """An RMS norm that is written out, and a gated product."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(F.silu(self.gate(h)) * self.up(h))
