"""The first training forward of a model, in which ``levels="auto"`` is decided.

Converted layers see it, by hooks, and not the model: trainers such as accelerate turn autocast on inside of its call.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod

import torch
from torch import nn

from dsq.quantizers import Quantized

_trials = 0  #: runs of models that go on which are no training


class FirstTraining:
    """A forward pre-hook of layers: calls ``decide`` of an object that lives in each training forward.

    Copies of a model share it. Pickled, it does nothing afterwards.
    """

    def __init__(self, decide: Callable[[], None] | None = None) -> None:
        self.decide = (lambda: None) if decide is None else WeakMethod(decide)

    def __call__(self, layer: nn.Module, args: Any) -> None:
        if layer.training and torch.is_grad_enabled() and isinstance(layer, Quantized):
            _decide(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FirstTraining":
        return self

    def __reduce__(self) -> Any:
        return FirstTraining, ()


def forget(layers: Iterable[nn.Module]) -> None:
    """Remove the hooks from layers."""
    for layer in layers:
        for number, hook in list(layer._forward_pre_hooks.items()):
            if isinstance(hook, FirstTraining):
                del layer._forward_pre_hooks[number]


def awaited(layers: Iterable[nn.Module]) -> bool:
    """Return whether a first training forward of the layers will call a ``decide``."""
    hooks = [hook for layer in layers for hook in layer._forward_pre_hooks.values()]
    return any(isinstance(hook, FirstTraining) and hook.decide() is not None for hook in hooks)


def _decide(hook: FirstTraining) -> None:
    decide = hook.decide()
    if decide is not None and not _trials:
        decide()


# torch.compiler.assume_constant_result without its import, which takes a second: where a compiler traces the hook, it
# calls this function, before it reads the layers' formats
_decide._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def trial() -> Iterator[None]:
    """Run models inside without a decision."""
    global _trials
    _trials += 1
    try:
        yield
    finally:
        _trials -= 1


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device has units that multiply matrices of bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("amx_bf16"))
