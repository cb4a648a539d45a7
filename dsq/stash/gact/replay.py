"""One training step remembered, so that its gradient can be computed again: inputs, random state, output gradient."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

from dsq.stash.gact.forwards import Dual


@dataclass
class RecordedStep:
    """A step of the loop seen from the model: what went in, and the gradient that came back at its outputs."""

    args: Any
    kwargs: Any
    random: list[Tensor]  #: states of the CPU's generator and of every CUDA device
    training: bool
    gradients: list[Tensor | None] = field(default_factory=list)  #: one an output tensor that needs a gradient

    @classmethod
    def start(cls, model: nn.Module, args: Any, kwargs: Any) -> Self:
        """Remember the inputs (aliases, not copies; without their history) and the random state before a forward."""
        args, kwargs = tree_map(_without_history, (args, kwargs))
        return cls(args, kwargs, _random_state(), model.training)

    def watch(self, output: Any) -> None:
        """Note the gradients that the backward brings to this output."""
        tensors = differentiable(output)
        self.gradients = [None] * len(tensors)
        for index, tensor in enumerate(tensors):
            tensor.register_hook(lambda grad, index=index: self._note(index, grad))

    def _note(self, index: int, grad: Tensor) -> None:
        self.gradients[index] = grad.detach().clone()

    @property
    def complete(self) -> bool:
        """Whether a backward came through the outputs, with finite gradients (a scaler's overflow is no use)."""
        arrived = [grad for grad in self.gradients if grad is not None]
        return bool(arrived) and all(bool(grad.isfinite().all()) for grad in arrived)

    def run(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """The forward again, buffers and random streams left as they are: (outputs, the gradients at them)."""
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        devices = list(range(torch.cuda.device_count())) if len(self.random) > 1 else []
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(self.random[0])
            for device, state in zip(devices, self.random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            output = torch.func.functional_call(model, buffers, self.args, self.kwargs)
        tensors = differentiable(output)
        if len(tensors) != len(self.gradients):  # what trained then is frozen now: there is nothing to measure
            return [], []
        kept = [(tensor, grad) for tensor, grad in zip(tensors, self.gradients, strict=True) if grad is not None]
        if any(tensor.shape != grad.shape for tensor, grad in kept):  # the output projection was resized since
            return [], []
        return [tensor for tensor, _ in kept], [grad for _, grad in kept]


def differentiable(output: Any) -> list[Tensor]:
    """The tensors of a model's output through which a gradient can come back: in containers, dataclasses, mappings."""
    found: list[Tensor] = []
    for leaf in tree_flatten(output)[0]:
        if isinstance(leaf, Tensor):
            found += [leaf] if leaf.requires_grad else []
        elif isinstance(leaf, Mapping):
            found += differentiable(list(leaf.values()))
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += differentiable([getattr(leaf, part.name) for part in fields(leaf)])
    return found


def sensitivities(gradient: Callable[[], Sequence[Tensor]], duals: Sequence[Dual], factor: float) -> list[float]:
    """c_l of each saved tensor (GACT, algorithm 1): 0.5 ||g_0 - g_1||^2 / S(b).

    Args:
        gradient: computes the parameters' gradient from the codes that ``duals`` read.
        duals: one a tensor, all at the first code; so they are left.
        factor: S(b) of the bits they all have.
    """
    first = [g.clone() for g in gradient()]
    result = []
    for dual in duals:
        dual.second = True
        second = gradient()
        dual.second = False
        distance = sum(float((a - b).double().square().sum()) for a, b in zip(first, second, strict=True))
        result.append(0.5 * distance / factor)
    return result


def _without_history(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return leaf.detach().requires_grad_(leaf.requires_grad)


def _random_state() -> list[Tensor]:
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]
