"""What policies ask of autograd."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack, unpack

#: () -> the (pack, unpack) that a tensor saved now would go through; None: PyTorch keeps it as it is
innermost_hooks: Callable[[], Hooks | None] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def in_checkpoint() -> bool:
    """Whether a segment of torch.utils.checkpoint runs, or is recomputed: it counts the tensors that are saved."""
    top = innermost_hooks()
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def in_backward() -> bool:
    """Whether a backward is running in this thread: what is saved now is a recomputation's."""
    return torch._C._current_graph_task_id() != -1


def refuse_create_graph() -> None:
    """RuntimeError in a backward with create_graph=True: a second derivative of rounded or sampled values is wrong."""
    if torch.is_grad_enabled() and in_backward():
        raise RuntimeError(
            "dsq.stash keeps this model's activations in a form that is differentiable once: create_graph=True is not "
            "supported"
        )
