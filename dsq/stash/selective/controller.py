"""What selective keeps of one forward, and counts of it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.stash.controller import Summary
from dsq.stash.hooks import Hooks, in_backward, innermost_hooks
from dsq.stash.interception import ForwardPolicy, TablePolicy, forward_policies
from dsq.stash.masks import TwoValued
from dsq.stash.selective.forms import Dropped, Kept, Outer, Saved, get, pass_on
from dsq.stash.selective.function_mode import PackOne, Rules
from dsq.stash.selective.layer_rules import LAYER_RULES
from dsq.stash.storages import StorageCache, is_plain, parameter_storages, storage_key


@dataclass(eq=False)
class Sign:
    """A ReLU's mask, until some other op keeps the memory it was made from."""

    mask: TwoValued | None
    layout: tuple[torch.Size, tuple[int, ...], int]  #: size, stride, offset in that memory
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
        if self.mask is None or kept.tensor.dtype is not self.mask.dtype:
            return
        self.kept = Kept(kept.tensor.as_strided(*self.layout), kept.version)
        self.mask = None


class SelectiveForward:
    """One forward of the model: the pack hook, what is kept so far, and how much memory PyTorch would keep.

    What is kept is referred to weakly: a graph that the forward drops, or runs backward itself, frees it.
    """

    def __init__(self, weights: set[int], outer: Hooks | None) -> None:
        self.weights = weights
        self.outer = outer
        self.kept: StorageCache[Kept] = StorageCache()
        self.signs: StorageCache[Sign] = StorageCache()
        self.others: list[ref[Any]] = []
        #: memory that a rule or a policy further out keeps in another form: address -> (what holds it, bytes)
        self.replaced: dict[int, tuple[StorageWeakRef, int]] = {}

    def keep(self, tensor: Tensor) -> Outer | Kept:
        """The pack hook: a tensor of which no rule makes less."""
        saved = pass_on(tensor, self.outer)
        if not is_plain(tensor):
            return saved
        storage = tensor.untyped_storage()
        if storage._cdata in self.weights:
            return saved
        if not isinstance(saved, Kept):  # a policy further out counts what it was passed
            self._replace(storage)
            return saved
        key = storage._cdata, saved.version
        self.kept.put(key, saved)
        sign = self.signs.pop(key)
        if sign is not None:
            sign.share(saved)
        return saved

    def pack_by_rule(self, pack_one: PackOne, tensor: Tensor) -> Saved | None:
        """What a rule makes of a tensor; None: keep() is to have it."""
        if not is_plain(tensor):
            return None
        storage = tensor.untyped_storage()
        if storage._cdata in self.weights:  # it exists anyway
            return None
        saved = pack_one(tensor)
        if saved is None or isinstance(saved, Kept):
            return None
        source = self._replace(storage)
        if isinstance(saved, TwoValued):
            saved = Sign(saved, (tensor.shape, tensor.stride(), int(tensor.storage_offset())))
            key = storage_key(tensor)
            kept = self.kept.get(key)
            if kept is None:
                self.signs.put(key, saved, source)
            else:
                saved.share(kept)
        self.others.append(ref(saved))
        return saved

    def _replace(self, storage: torch.UntypedStorage) -> StorageWeakRef:
        """Count memory that PyTorch would keep; the reference that holds its address."""
        replaced = self.replaced.get(storage._cdata)
        if replaced is None:
            replaced = self.replaced[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return replaced[0]

    def summary(self, name: str) -> Summary:
        """In numbers; of what is still alive."""
        storages = [saved.tensor.untyped_storage() for saved in self.kept.pop_all()]
        kept = {storage._cdata: storage.nbytes() for storage in storages}
        others = [form for form in (other() for other in self.others) if form is not None]
        raw = {address: nbytes for address, (_, nbytes) in self.replaced.items()} | kept
        dropped = sum(isinstance(form, Dropped) for form in others)
        few_bits = [form.nbytes for form in others if not isinstance(form, Dropped) and form.nbytes > 0]
        details = (f"{dropped} tensors dropped, {len(few_bits)} in few bits, {len(kept)} kept",)
        return Summary(name, (), sum(raw.values()), sum(kept.values()) + sum(few_bits), details)


class Selective(ForwardPolicy):
    """The latest training forward."""

    latest: Summary | None = None

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        if any(isinstance(policy, TablePolicy) for policy in forward_policies(module)):
            yield  # whose rows keep no more than the leaves need, and that in fewer bits
            return
        forward = SelectiveForward(parameter_storages(self.model, module), innermost_hooks())
        hooks = forward.keep, get
        with saved_tensors_hooks(*hooks), Rules(LAYER_RULES, forward.pack_by_rule, hooks):
            yield
        if not in_backward():  # where it is a recomputation
            self.latest = forward.summary(self.name)

    def report(self) -> Summary:
        """Bytes of the latest training forward."""
        return self.latest or Summary(self.name)
