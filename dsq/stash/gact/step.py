"""What GACT measures of the training loop: a step, remembered to be run again, and the gradient's variance."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsq.stash.controller import Controller
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
        cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else []
        return cls(args, kwargs, [torch.get_rng_state(), *cuda], model.training)

    def watch(self, output: Any) -> None:
        """Note the gradients that the backward brings to this output."""
        tensors = differentiable(output)
        self.gradients = [None] * len(tensors)
        for index, tensor in enumerate(tensors):
            tensor.register_hook(partial(self._note, index))

    def _note(self, index: int, grad: Tensor) -> None:
        self.gradients[index] = grad.detach().clone()

    @property
    def complete(self) -> bool:
        """Whether a backward came through the outputs, with finite gradients (a scaler's overflow is no use)."""
        arrived = [grad for grad in self.gradients if grad is not None]
        return bool(arrived) and all(bool(grad.isfinite().all()) for grad in arrived)

    def run(self, model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
        """The forward again, buffers and random streams left as they are: (outputs, the gradients at them).

        Nothing where the outputs are not those of the step: a layer was frozen, or resized, since.
        """
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        devices = list(range(torch.cuda.device_count())) if len(self.random) > 1 else []
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(self.random[0])
            for device, state in zip(devices, self.random[1:], strict=True):
                torch.cuda.set_rng_state(state, device)
            output = torch.func.functional_call(model, buffers, self.args, self.kwargs)
        tensors = differentiable(output)
        if len(tensors) != len(self.gradients):
            return [], []
        pairs = [(tensor, grad) for tensor, grad in zip(tensors, self.gradients, strict=True) if grad is not None]
        if any(tensor.shape != grad.shape for tensor, grad in pairs):
            return [], []
        return [tensor for tensor, _ in pairs], [grad for _, grad in pairs]


def differentiable(output: Any) -> list[Tensor]:
    """The tensors of a model's output that need a gradient: in lists, tuples, dicts and outputs of transformers."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.requires_grad]


def _without_history(leaf: Any) -> Any:
    return leaf.detach().requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf


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


_SAMPLED = 1024  #: coordinates of each parameter, evenly spaced: means of all would cost as much as the parameters
_FEWEST = 10  #: gradients before which no variance is told


class GradientVariance:
    """Var[g] of the gradients that reach the parameters while it listens, on a sample of their coordinates.

    Non-finite gradients (a loss scaler's overflow) are passed over.
    """

    def __init__(self, controller: Controller) -> None:
        self.listening = False
        self.sums: dict[str, tuple[int, Tensor, Tensor]] = {}  #: gradients, their sum, the sum of their squares
        for name, parameter in controller.model.named_parameters():
            if parameter.requires_grad:
                controller.until_removed(parameter.register_hook(partial(self._note, name)))

    def restart(self) -> None:
        """Forget, and listen."""
        self.listening, self.sums = True, {}

    def _note(self, name: str, grad: Tensor) -> None:
        if not self.listening or not grad.numel():
            return
        sample = grad.detach().reshape(-1)[:: max(1, grad.numel() // _SAMPLED)].double()
        count, total, square = self.sums.get(name, (0, torch.zeros_like(sample), sample.new_zeros(())))
        if total.shape == sample.shape and bool(sample.isfinite().all()):
            self.sums[name] = count + 1, total + sample, square + sample.square().sum()

    def value(self, sizes: Mapping[str, int]) -> float | None:
        """The variance, summed over the parameters; None before ten gradients came.

        sizes: values of each parameter, by name.
        """
        variance = 0.0
        for name, (count, total, square) in self.sums.items():
            if count < _FEWEST:
                return None
            of_sample = float(square - total.square().sum() / count) / (count - 1)
            variance += of_sample * sizes.get(name, 0) / total.numel()
        return max(variance, 0.0) if self.sums else None

    def state_dict(self) -> dict[str, Any]:
        return {"listening": self.listening, "sums": dict(self.sums)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take back what state_dict gave, on the device of the model."""
        self.listening = state["listening"]
        self.sums = {name: (n, a.to(device), b.to(device)) for name, (n, a, b) in state["sums"].items()}
