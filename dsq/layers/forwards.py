"""Two hooks that bound a forward, in which layers share the codes of their inputs (dsq/ops/shared_inputs.py)."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dsq.layers import not_compiled_alone
from dsq.ops.shared_inputs import begin_forward, end_forward
from dsq.quantizers import Quantized


def bound_forwards(model: nn.Module) -> Callable[[nn.Module], Any]:
    """Let calls of ``model``, and of its parts with several converted layers, bound a forward; return the inverse."""
    for module in model.modules():
        layers = sum(isinstance(part, Quantized) for part in module.modules())
        if layers > 1 or (module is model and not isinstance(model, Quantized)):
            module.register_forward_pre_hook(_begin, prepend=True)
            module.register_forward_hook(_end, always_call=True)
    return free_forwards


def free_forwards(model: nn.Module) -> Callable[[nn.Module], Any]:
    """Remove the hooks of ``bound_forwards`` from ``model`` and its parts; return the inverse."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for number in [number for number, hook in hooks.items() if hook in (_begin, _end)]:
                del hooks[number]
                module._forward_hooks_always_called.pop(number, None)
    return bound_forwards


@not_compiled_alone
def _begin(module: nn.Module, inputs: Any) -> None:
    if not torch.compiler.is_compiling():  # a compiler removes duplicate packing by itself
        begin_forward(module)


@not_compiled_alone
def _end(module: nn.Module, inputs: Any, output: Any) -> None:
    if not torch.compiler.is_compiling():
        end_forward(module)
