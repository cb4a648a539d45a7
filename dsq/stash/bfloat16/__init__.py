"""Saved float32 tensors kept in bfloat16: half the bytes, 8 bits of significand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dsq.arguments import whole_number
from dsq.stash.controller import Controller
from dsq.stash.policy import register
from dsq.stash.saved_tensors.forms import get
from dsq.stash.saved_tensors.forward_stash import ForwardStash
from dsq.stash.saved_tensors.hooks import around_forward
from dsq.stash.saved_tensors.memory_order import MemoryOrder
from dsq.stash.saved_tensors.rules.few_bits import FEW_BITS
from dsq.stash.saved_tensors.rules.function_mode import Rules
from dsq.stash.saved_tensors.storages import parameter_storages


@dataclass(eq=False, slots=True)
class Cast:
    """A tensor's values in a dtype of their own."""

    values: Tensor

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return self.values.to(dtype)


@register("bfloat16", composes_with=("checkpoint",))
def attach(model: nn.Module, *, smallest: int = 256) -> Controller:
    """Keep float32 tensors of at least ``smallest`` values in bfloat16. Raises ValueError for ``smallest`` under 0."""
    smallest = whole_number("smallest", smallest, 0)
    controller = Controller(model)

    def encode(tensor: Tensor, order: MemoryOrder, values: Tensor) -> Cast | None:
        if tensor.dtype != torch.float32 or values.numel() < smallest:
            return None
        return Cast(values.contiguous().to(torch.bfloat16))

    @contextmanager
    def hooks() -> Iterator[None]:
        stash = ForwardStash(encode, parameter_storages(model), batch=set())
        with saved_tensors_hooks(stash.pack, get), Rules(FEW_BITS, stash.pack_by_rule, stash.note_call):
            yield

    around_forward(controller, model, hooks)  # controller.remove() takes the hooks away again
    return controller
