"""Saved float32 tensors kept in bfloat16: half the bytes, 8 bits of significand."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsq.arguments import whole_number
from dsq.stash.policy import Controller, register
from dsq.stash.saved_tensors.forms import Kept, Saved, get
from dsq.stash.saved_tensors.history import is_weight
from dsq.stash.saved_tensors.hooks import around_forward, refuse_create_graph
from dsq.stash.saved_tensors.storages import is_plain, parameter_storages


class Halved(Kept):
    """The bfloat16 copy of a float32 tensor."""

    def get(self) -> Tensor:
        refuse_create_graph()
        return self.tensor.float()


@register("bfloat16", composes_with=("checkpoint",))
def attach(model: nn.Module, *, smallest: int = 256) -> Controller:
    """Keep float32 tensors of at least ``smallest`` values in bfloat16. Raises ValueError for ``smallest`` under 0."""
    smallest = whole_number("smallest", smallest, 0)
    controller = Controller(model)

    @contextmanager
    def hooks() -> Iterator[None]:
        weights = parameter_storages(model)

        def pack(x: Tensor) -> Saved:
            if not is_plain(x) or x.dtype != torch.float32 or x.numel() < smallest or is_weight(x, weights):
                return Kept.of(x)
            return Halved.of(x.to(torch.bfloat16))

        with saved_tensors_hooks(pack, get):
            yield

    around_forward(controller, model, hooks)  # controller.remove() takes the hooks away again
    return controller
