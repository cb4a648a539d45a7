"""Forms of a saved tensor that no gradient can tell from the tensor: only its shape, or narrower integers."""

from __future__ import annotations

from dataclasses import dataclass
from operator import mul
from weakref import ref

import torch
from torch import Tensor


@dataclass(eq=False)
class StandIn:
    """Memory of any content, made in the backward, that every dropped tensor of one kind then shares.

    Fresh memory for each would cost more in page faults than the op that ignores it.
    """

    memory: Tensor

    def at_least(self, numel: int) -> Tensor:
        """The memory, grown to ``numel`` elements."""
        if self.memory.numel() < numel:
            self.memory = torch.empty(numel, dtype=self.memory.dtype, device=self.memory.device)
        return self.memory


#: each alive as long as a dropped tensor of its kind is (a WeakValueDictionary takes ten times as long to look it up)
_stand_ins: dict[tuple[torch.dtype, torch.device], ref[StandIn]] = {}


@dataclass(eq=False, slots=True, weakref_slot=True)  # as hooks.Kept
class Dropped:
    """A saved tensor that the backward asks for its shape and layout only: its values change no result."""

    shape: torch.Size
    stride: tuple[int, ...]
    stand_in: StandIn

    @classmethod
    def of(cls, x: Tensor) -> Dropped:
        """The shape and layout of ``x``."""
        kind = (x.dtype, x.device)
        found = _stand_ins.get(kind)
        stand_in = None if found is None else found()
        if stand_in is None:
            stand_in = StandIn(torch.empty(0, dtype=x.dtype, device=x.device))
            _stand_ins[kind] = ref(stand_in)
        return cls(x.shape, x.stride(), stand_in)

    def get(self) -> Tensor:
        """Memory of that shape and layout."""
        span = 1 + sum(map(mul, self.shape, self.stride)) - sum(self.stride)
        return self.stand_in.at_least(span).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class Narrow:
    """Integers in a narrower type that holds them all."""

    values: Tensor
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def get(self) -> Tensor:
        """The tensor in the type it had."""
        return self.values.to(self.dtype)
