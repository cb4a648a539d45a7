"""Selective differentiation (memsave): keep only what the leaves that want a gradient need. Gradients are PyTorch's,
bit for bit; what is kept is never more than PyTorch keeps.

The rules (rules.py has the table) act around each call of a layer's function while the model's forward runs, so layers,
shared layers, subclasses and bare F.relu calls are all covered, and no module is replaced.

A ReLU's 1-bit mask costs bytes where the next layer keeps the ReLU's output anyway (everything trains: 1/32 more).
Such a mask is given up as soon as another op keeps the same memory: the ReLU then shares that.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.stash.bit_rules import RELU_FAMILY
from dsq.stash.calls import Call, PackOne, Rule, Rules, Saved
from dsq.stash.hooks import Hooks, Kept, Outer, around_forward, innermost_hooks, pass_on, storage_key
from dsq.stash.masks import TwoValued
from dsq.stash.policy import Controller, register
from dsq.stash.rules import EXACT


@register("selective", composes_with=("bfp", "gact", "checkpoint", "wtacrs"))
def attach(model: nn.Module) -> Controller:
    """Keep what the differentiable leaves need. No options: who needs a gradient is asked at each call.

    Raises ValueError for a model without modules that keep anything (no parameters and no children).
    """
    if not any(True for _ in model.parameters()) and not any(True for _ in model.children()):
        raise ValueError("nothing to stash: the model has neither parameters nor submodules")
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


@dataclass(eq=False)
class Selective(Controller):
    """The signs of the forwards whose graphs are alive, by the memory they were made from."""

    signs: WeakValueDictionary[tuple[int, int], Sign] = field(default_factory=WeakValueDictionary, repr=False)
    kept: WeakValueDictionary[tuple[int, int], Kept] = field(default_factory=WeakValueDictionary, repr=False)

    @contextmanager
    def context(self) -> Iterator[None]:
        """What is entered around the model's forward."""
        outer = innermost_hooks()
        table = EXACT | {func: self._shareable(rule) for func, rule in RELU_FAMILY.items()}
        with ExitStack() as stack:
            stack.enter_context(saved_tensors_hooks(lambda t: self._keep(t, outer), lambda saved: saved.get()))
            stack.enter_context(Rules(table))
            yield

    def _keep(self, tensor: Tensor, outer: Hooks | None) -> Outer | Kept:
        saved = pass_on(tensor, outer)
        if isinstance(saved, Kept):
            key = storage_key(tensor)
            sign = self.signs.pop(key, None)
            if sign is not None:
                sign.share(saved)
            self.kept[key] = saved
        return saved

    def _shareable(self, rule: Rule) -> Rule:
        def shareable(call: Call) -> PackOne | None:
            pack = rule(call)
            return None if pack is None else lambda tensor: self._sign(tensor, pack)

        return shareable

    def _sign(self, tensor: Tensor, pack: PackOne) -> Saved | None:
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
