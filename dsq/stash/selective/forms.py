"""Forms in which a saved tensor is kept: each has get(), the tensor again or one that the backward cannot tell from it.

What a pack hook returns must hold no reference to the tensor itself, only to a detached alias: of an output of the op
(softmax, ReLU) node -> saved -> grad_fn -> node would be a cycle that keeps the stash alive.
"""

from collections.abc import Callable
from dataclasses import dataclass
from operator import mul
from typing import Any, Protocol, Self
from weakref import ref

import torch
from torch import Tensor

from dsq.stash.hooks import Hooks


class Saved(Protocol):
    """A saved tensor in some form. One that is the mask of a ReLU's result has mask_bits besides: the bits (uint8), or
    None once it is no mask any more.
    """

    def get(self) -> Tensor: ...


def get(saved: Saved) -> Tensor:
    """The unpack hook of all forms."""
    return saved.get()


@dataclass(eq=False, slots=True, weakref_slot=True)  # made for every saved tensor: frozen takes three times as long
class Kept:
    """A saved tensor kept as it is, with the check of its version that autograd leaves to whoever installs hooks."""

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> Self:
        alias = tensor.detach()  # same storage, same version counter, no grad_fn
        return cls(alias, alias._version)

    def get(self) -> Tensor:
        """The tensor; RuntimeError when it was modified in place after it was saved."""
        if self.tensor._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {tuple(self.tensor.shape)} needed for the gradient was modified in place after it "
                f"was saved (version {self.tensor._version}, saved at {self.version})"
            )
        return self.tensor


@dataclass(frozen=True)
class Outer:
    """A saved tensor in the form that the hooks further out gave it."""

    packed: Any
    unpack: Callable[[Any], Tensor]

    def get(self) -> Tensor:
        return self.unpack(self.packed)


def pass_on(tensor: Tensor, outer: Hooks | None) -> Outer | Kept:
    """What hooks that leave a tensor alone keep of it: what the next hooks outwards make of it, or itself."""
    return Kept.of(tensor) if outer is None else Outer(outer[0](tensor), outer[1])


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


@dataclass(eq=False, slots=True, weakref_slot=True)  # as Kept
class Dropped:
    """A saved tensor that the backward asks for its shape and layout only: its values change no result."""

    shape: torch.Size
    stride: tuple[int, ...]
    stand_in: StandIn

    @classmethod
    def of(cls, x: Tensor) -> Self:
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
    dtype: torch.dtype  #: that the tensor had

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def get(self) -> Tensor:
        return self.values.to(self.dtype)
