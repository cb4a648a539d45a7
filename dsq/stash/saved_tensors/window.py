"""Hooks between a forward and its backward: they see what the loss saves, which a plain loop computes after the model.

Pushed when the forward ends, if no other hooks are active: contexts that the user enters later then nest inside of them
and leave in order. Where the user has hooks around the training step, the loss keeps what those keep.

Taken off when the next forward starts, of this or another model under a policy, when an optimizer steps, or by the
first tensor saved after the backward began: nothing else that the thread runs is saved through them.

They act on tensors computed from the model's outputs, until a gradient arrives at those, or until a weight of another
model is met: what that model keeps is not this policy's.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from dsq.stash.controller import Controller
from dsq.stash.saved_tensors.forms import Kept, get
from dsq.stash.saved_tensors.history import leaf_of
from dsq.stash.saved_tensors.hooks import Leftover, innermost_hooks, take_off_leftovers

_FAR = 64  #: autograd nodes between an output and what counts as its loss; losses are a few


class LossWindow(Leftover):
    """Hooks of one thread of training: open() after a forward, close() when its backward begins, take_off() before the
    next forward.
    """

    def __init__(self) -> None:
        self._pack_open: Callable[[Tensor], Any] | None = None
        self._outputs: set[int] = set()  # sequence numbers: the nodes themselves would keep their graph alive
        self._storages: set[int] = set()

    def open(self, pack: Callable[[Tensor], Any], outputs: Sequence[Tensor], storages: set[int]) -> None:
        """Let pack see what is saved of tensors computed from the outputs; what it returns must have get().

        storages: those of the model's own parameters and buffers.
        """
        take_off_leftovers()
        if innermost_hooks() is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, get)
            self._pack_open, self._storages = pack, storages
            self._outputs = {output.grad_fn._sequence_nr() for output in outputs if output.grad_fn is not None}

    def close(self) -> None:
        """Keep what is saved from now on as it is. (A backward may run in another thread: it cannot take hooks off.)"""
        self._pack_open, self._outputs = None, set()

    def take_off(self) -> None:
        """Remove the hooks, if no context of the user's lies above them."""
        self.close()
        take_off_leftovers()

    def _pack(self, tensor: Tensor) -> Any:
        leaf = leaf_of(tensor)
        if leaf is not None and leaf.untyped_storage()._cdata not in self._storages:
            self.close()
        if self._pack_open is None:
            take_off_leftovers()
            return Kept.of(tensor)
        if not self._follows_output(tensor):
            return Kept.of(tensor)
        return self._pack_open(tensor)

    def _follows_output(self, tensor: Tensor) -> bool:
        queue: deque[Any] = deque([tensor.grad_fn])
        seen: set[Any] = set()
        while queue and len(seen) < _FAR:
            node = queue.popleft()
            if node is None or node in seen:
                continue
            if node._sequence_nr() in self._outputs:
                return True
            seen.add(node)
            queue.extend(child for child, _ in node.next_functions)
        return False


def take_off_before_steps(controller: Controller) -> None:
    """Let any optimizer's step end the windows of its thread, until the controller is removed."""
    controller.until_removed(register_optimizer_step_pre_hook(lambda *_: take_off_leftovers()))
