"""Selective differentiation (memsave): keep only what the leaves that want a gradient need. Gradients are PyTorch's,
bit for bit; what is kept is never more than PyTorch keeps.

The rules (rules.py has the table) act around each call of a layer's function while the model's forward runs, so layers,
shared layers, subclasses and bare F.relu calls are all covered, and no module is replaced.

A ReLU's 1-bit mask costs bytes where the next layer keeps the ReLU's output anyway (everything trains: 1/32 more).
Such a mask is given up as soon as another op keeps the same memory: the ReLU then shares that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.stash.calls import PackOne, Rules, Saved
from dsq.stash.forms import Dropped
from dsq.stash.hooks import (
    Hooks,
    Kept,
    Outer,
    around_forward,
    get,
    innermost_hooks,
    parameter_storages,
    pass_on,
)
from dsq.stash.masks import TwoValued
from dsq.stash.policy import Controller, Summary, register
from dsq.stash.rules import EXACT


@register("selective", composes_with=("bfp", "gact", "checkpoint", "wtacrs"))
def attach(model: nn.Module) -> Controller:
    """Keep what the differentiable leaves need. No options: who needs a gradient is asked at each call."""
    controller = Selective(model)
    around_forward(controller, model, controller.context)
    return controller


@dataclass(eq=False)
class Sign:
    """A ReLU's mask, until some other op keeps the memory it was made from."""

    mask: TwoValued | None
    source: StorageWeakRef  #: keeps the storage's address from being reused while this is looked up by it
    layout: tuple[tuple[int, ...], tuple[int, ...], int]  #: size, stride, offset in that memory
    kept: Kept | None = None

    @property
    def nbytes(self) -> int:
        """Of the mask, if there still is one."""
        return 0 if self.mask is None else self.mask.nbytes

    @property
    def mask_bits(self) -> Tensor | None:
        """The mask's, uint8, if there still is one."""
        return None if self.mask is None else self.mask.mask_bits

    def get(self) -> Tensor:
        """What threshold_backward is given."""
        if self.mask is not None:
            return self.mask.get()
        assert self.kept is not None
        return self.kept.get()

    def share(self, kept: Kept) -> None:
        """Give up the mask for the memory that another op keeps, unless that sees it as other numbers."""
        if self.mask is None or kept.tensor.dtype is not self.mask.dtype or kept.tensor.is_neg():
            return
        self.kept = Kept(kept.tensor.as_strided(*self.layout), kept.version)
        self.mask = None


class Forward:
    """One forward of the model: the pack hook, what is kept so far, and how much memory PyTorch would keep.

    What is kept is referred to weakly: a graph that the forward drops, or runs backward itself, frees it.
    """

    def __init__(self, weights: set[int], outer: Hooks | None) -> None:
        self.weights = weights
        self.outer = outer
        #: by the address of a storage and its version; with the storage's bytes
        self.kept: dict[tuple[int, int], tuple[ref[Kept], int]] = {}
        self.signs: dict[tuple[int, int], ref[Sign]] = {}  #: by those of the memory each was made from
        self.others: list[ref[Any]] = []
        self.replaced: dict[int, tuple[StorageWeakRef, int]] = {}  #: memory of others; a reference holds its address

    def keep(self, tensor: Tensor) -> Outer | Kept:
        """The pack hook: a tensor of which no rule makes less."""
        saved = pass_on(tensor, self.outer)
        if tensor.layout is not torch.strided:  # sparse: no storage of its own
            return saved
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.weights:
            return saved
        if not isinstance(saved, Kept):  # a policy further out counts what it was passed
            self._replace(storage)
            return saved
        key = address, saved.version
        self.kept[key] = ref(saved), storage.nbytes()
        sign = self.signs.pop(key, _gone)()
        if sign is not None:
            sign.share(saved)
        return saved

    def form(self, pack_one: PackOne, tensor: Tensor) -> Saved | None:
        """What a rule makes of a tensor; None: keep() is to have it."""
        if tensor.layout is not torch.strided or tensor.is_neg():  # the memory of a conjugate's part has other signs
            return None
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address in self.weights:  # it exists anyway
            return None
        saved = pack_one(tensor)
        if saved is None:
            return None
        source = self._replace(storage)
        if isinstance(saved, TwoValued):
            layout = tensor.shape, tensor.stride(), int(tensor.storage_offset())
            saved = self._sign(Sign(saved, source, layout), (address, tensor._version))
        self.others.append(ref(saved))
        return saved

    def _replace(self, storage: torch.UntypedStorage) -> StorageWeakRef:
        """Count memory that PyTorch would keep; the reference that holds its address."""
        replaced = self.replaced.get(storage._cdata)
        if replaced is None:
            replaced = self.replaced[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return replaced[0]

    def _sign(self, sign: Sign, key: tuple[int, int]) -> Sign:
        kept = self.kept.get(key, (_gone, 0))[0]()
        if kept is None:
            self.signs[key] = ref(sign)
        else:
            sign.share(kept)
        return sign

    def summary(self, name: str) -> Summary:
        """In numbers; of what is still alive."""
        kept = {key[0]: nbytes for key, (saved, nbytes) in self.kept.items() if saved() is not None}
        others = [form for form in (other() for other in self.others) if form is not None]
        raw = {address: nbytes for address, (_, nbytes) in self.replaced.items()} | kept
        dropped = sum(isinstance(form, Dropped) for form in others)
        few_bits = [form.nbytes for form in others if not isinstance(form, Dropped) and form.nbytes > 0]
        details = (f"{dropped} tensors dropped, {len(few_bits)} in few bits, {len(kept)} kept",)
        return Summary(name, (), sum(raw.values()), sum(kept.values()) + sum(few_bits), details)


def _gone() -> None:
    """A reference to nothing."""


class Selective(Controller):
    """The latest training forward."""

    latest: Summary | None = None

    @contextmanager
    def context(self) -> Iterator[None]:
        """What is entered around the model's forward."""
        forward = Forward(parameter_storages(self.model), innermost_hooks())
        with saved_tensors_hooks(forward.keep, get), Rules(EXACT, forward.form):
            yield
        if torch._C._current_graph_task_id() == -1:  # not a recomputation
            self.latest = forward.summary(self.name)

    def report(self) -> Summary:
        """Bytes of the latest training forward."""
        return self.latest or Summary(self.name)
