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
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.stash.bit_rules import RELU_FAMILY
from dsq.stash.calls import Call, PackOne, Rule, Rules, Saved
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
    storage_key,
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
        """Give up the mask for the memory that another op keeps."""
        self.kept = Kept(kept.tensor.as_strided(*self.layout), kept.version)
        self.mask = None


class Tally:
    """Bytes of one forward: what PyTorch would keep (unique storages, no weights), and what is kept for it."""

    def __init__(self, weights: set[int]) -> None:
        self.weights = weights
        self.raw: dict[int, tuple[StorageWeakRef, int]] = {}  # the reference keeps the address from being reused
        self.whole: set[int] = set()
        self.forms: list[ref[Any]] = []
        self.dropped = 0

    def is_weight(self, tensor: Tensor) -> bool:
        """Whether its memory is a weight's."""
        return tensor.untyped_storage()._cdata in self.weights

    def note(self, tensor: Tensor, saved: Any) -> None:
        """One saved tensor, no weight, and the form it is kept in."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.raw:
            self.raw[key] = StorageWeakRef(storage), storage.nbytes()
        if isinstance(saved, Kept):
            self.whole.add(key)
        elif isinstance(saved, Dropped):
            self.dropped += 1
        else:
            self.forms.append(ref(saved))

    def summary(self, name: str) -> Summary:
        """In numbers; a policy further out counts what it was passed itself."""
        forms = [form for form in (alive() for alive in self.forms) if form is not None and not isinstance(form, Outer)]
        kept = sum(self.raw[key][1] for key in self.whole) + sum(form.nbytes for form in forms)
        small = sum(form.nbytes > 0 for form in forms)
        details = (f"{self.dropped} tensors dropped, {small} in few bits, {len(self.whole)} kept",)
        return Summary(name, (), sum(nbytes for _, nbytes in self.raw.values()), kept, details)


@dataclass(eq=False)
class Selective(Controller):
    """The signs of the forwards whose graphs are alive, by the memory they were made from."""

    signs: WeakValueDictionary[tuple[int, int], Sign] = field(default_factory=WeakValueDictionary, repr=False)
    kept: WeakValueDictionary[tuple[int, int], Kept] = field(default_factory=WeakValueDictionary, repr=False)

    latest: Summary | None = None

    @contextmanager
    def context(self) -> Iterator[None]:
        """What is entered around the model's forward."""
        outer, tally = innermost_hooks(), Tally(parameter_storages(self.model))
        table = EXACT | {func: self._shareable(rule, tally) for func, rule in RELU_FAMILY.items()}
        table = {func: _noted(rule, tally) for func, rule in table.items()}
        with saved_tensors_hooks(lambda t: self._keep(t, outer, tally), get), Rules(table):
            yield
        if torch._C._current_graph_task_id() == -1:  # not a recomputation
            self.latest = tally.summary(self.name)

    def report(self) -> Summary:
        """Bytes of the latest training forward."""
        return self.latest or Summary(self.name)

    def _keep(self, tensor: Tensor, outer: Hooks | None, tally: Tally) -> Outer | Kept:
        saved = pass_on(tensor, outer)
        if tensor.layout is not torch.strided or tally.is_weight(tensor):  # sparse: no storage of its own
            return saved
        tally.note(tensor, saved)
        if isinstance(saved, Kept):
            key = storage_key(tensor)
            sign = self.signs.pop(key, None)
            if sign is not None:
                sign.share(saved)
            self.kept[key] = saved
        return saved

    def _shareable(self, rule: Rule, tally: Tally) -> Rule:
        def shareable(call: Call) -> PackOne | None:
            pack = rule(call)
            return None if pack is None else lambda tensor: self._sign(tensor, pack, tally)

        return shareable

    def _sign(self, tensor: Tensor, pack: PackOne, tally: Tally) -> Saved | None:
        if tally.is_weight(tensor):  # it exists anyway
            return None
        mask = pack(tensor)
        if not isinstance(mask, TwoValued):
            return mask
        layout = (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()))
        sign = Sign(mask, StorageWeakRef(tensor.untyped_storage()), layout)
        key = storage_key(tensor)
        kept = self.kept.get(key)
        if kept is None:
            self.signs[key] = sign
        else:
            sign.share(kept)
        return sign


def _noted(rule: Rule, tally: Tally) -> Rule:
    def noted(call: Call) -> PackOne | None:
        pack = rule(call)

        def pack_and_note(tensor: Tensor) -> Saved | None:
            saved = pack(tensor) if pack is not None else None
            if saved is not None and not tally.is_weight(tensor):  # what is passed on is noted where it arrives
                tally.note(tensor, saved)
            return saved

        return None if pack is None else pack_and_note

    return noted
