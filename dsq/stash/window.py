"""Between the forward and its backward: the hooks that also see what the loss saves, in a plain loop.

The context around the model's forward ends with it; the loss is computed after. These hooks are pushed when the forward
ends and taken off when the next one starts, and act only until a gradient arrives at the model's outputs. They are
pushed only where no other hooks are active, so that contexts the user enters later nest inside of them and leave in
order; where the user has hooks around the training step, the loss keeps what those keep.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dsq.stash.hooks import Kept, innermost_hooks


class LossWindow:
    """Hooks of one thread of training. open() after a forward, close() when its backward begins, take_off() before the
    next.
    """

    def __init__(self) -> None:
        self._pack_open: Callable[[Tensor], Any] | None = None

    def open(self, pack: Callable[[Tensor], Any]) -> None:
        """Let pack see every tensor saved from now on; what it returns must have get()."""
        if innermost_hooks() is None:
            torch._C._autograd._push_saved_tensors_default_hooks(self._pack, self._unpack)
            self._pack_open = pack

    def close(self) -> None:
        """Keep what is saved from now on as it is. The backward may run in another thread: it cannot take the hooks
        off.
        """
        self._pack_open = None

    def take_off(self) -> None:
        """Remove the hooks, if no context of the user's lies above them."""
        self.close()
        top = innermost_hooks()
        if top is not None and top[0] == self._pack:
            torch._C._autograd._pop_saved_tensors_default_hooks()

    def _pack(self, tensor: Tensor) -> Any:
        return Kept.of(tensor) if self._pack_open is None else self._pack_open(tensor)

    @staticmethod
    def _unpack(packed: Any) -> Tensor:
        return packed.get()
