"""What checkpointing counts of a forward."""

from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.stash.controller import Controller, Summary
from dsq.stash.hooks import in_backward
from dsq.stash.storages import parameter_storages, storages_of, weak


class SegmentCount:
    """What the segments of the latest training forward keep; a deep copy of the model shares it, a pickled segment
    starts anew.
    """

    def __init__(self) -> None:
        self.start(set())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return SegmentCount, ()

    def start(self, outside: set[int]) -> None:
        """Count from 0; outside: storages that are there anyway, weights and the caller's batch."""
        self.calls = 0
        self.nbytes = 0  #: of the inputs and of the states of random generators
        self._seen: dict[int, StorageWeakRef | None] = dict.fromkeys(outside)

    def note(self, tensors: list[Tensor], random: int) -> None:
        """A segment keeps these and `random` bytes of random state; in a backward it does so for a moment only."""
        if in_backward():
            return
        self.calls += 1
        self.nbytes += random
        for tensor in tensors:
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in self._seen:
                ref = weak(tensor)
                self._seen[ref.cdata] = ref  # so that no later storage gets its address
                self.nbytes += tensor.untyped_storage().nbytes()


@dataclass(eq=False)
class Checkpointing(Controller):
    """The count of the latest training forward."""

    count: SegmentCount = field(default_factory=SegmentCount)

    def start(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a forward of the model: a training one is counted afresh."""
        if torch.is_grad_enabled() and not in_backward():
            self.count.start(parameter_storages(self.model) | storages_of((args, kwargs)))

    def report(self) -> Summary:
        """Raw and kept are one: a policy that packs these inputs says so in its own report."""
        details = (f"inputs of {self.count.calls} segments; what they recompute in the backward is not counted",)
        return Summary(self.name, self.attached, self.count.nbytes, self.count.nbytes, details)
