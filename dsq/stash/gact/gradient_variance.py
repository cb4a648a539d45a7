"""The variance of the training gradient, from a running mean over the steps, on a sample of its coordinates."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsq.stash.controller import Controller

#: coordinates of each parameter, evenly spaced: a running mean of all would cost as much as the parameters
_SAMPLED = 1024
_DECAY = 0.9
_FEWEST = 10  #: gradients before which no variance is told


class GradientVariance:
    """Var[g] = E||g||^2 - ||E g||^2, exponential means over the gradients that reach the parameters while it listens.

    Non-finite gradients (a loss scaler's overflow) are passed over.
    """

    def __init__(self, controller: Controller, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.listening = False
        self.means: dict[str, Tensor] = {}  #: of the sampled coordinates
        self.sums: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  #: mean of ||g||^2, weights, squares of the weights
        for name, parameter in parameters:
            controller.until_removed(parameter.register_hook(partial(self._note, name)))

    def restart(self) -> None:
        """Forget, and listen."""
        self.listening, self.means, self.sums = True, {}, {}

    def _note(self, name: str, grad: Tensor) -> None:
        if not self.listening or not grad.numel():
            return
        sample = grad.detach().reshape(-1)[:: max(1, grad.numel() // _SAMPLED)].float()
        square = sample.square().sum() * (grad.numel() / sample.numel())
        if name in self.means and self.means[name].shape != sample.shape:  # an embedding that was resized
            del self.means[name], self.sums[name]
        none, one = torch.zeros_like(square), torch.ones_like(square)
        mean = self.means.get(name, torch.zeros_like(sample))
        old_square, weight, weights = self.sums.get(name, (none, none, none))
        finite = square.isfinite()
        self.means[name] = torch.where(finite, _DECAY * mean + (1 - _DECAY) * sample, mean)
        self.sums[name] = (
            torch.where(finite, _DECAY * old_square + (1 - _DECAY) * square, old_square),
            torch.where(finite, _DECAY * weight + (1 - _DECAY) * one, weight),
            torch.where(finite, _DECAY**2 * weights + (1 - _DECAY) ** 2 * one, weights),
        )

    def value(self, sizes: Mapping[str, int]) -> float | None:
        """The variance, summed over the parameters; None before ten gradients came.

        sizes: values of each parameter, by name.
        """
        total = 0.0
        for name, (square, weight, weights) in ((n, tuple(map(float, s))) for n, s in self.sums.items()):
            if name not in sizes:  # a layer that was replaced
                continue
            if weight < 1 - _DECAY**_FEWEST * 1.001:
                return None
            mean = self.means[name] / weight
            scale = sizes[name] / mean.numel()
            # a mean of n gradients carries 1/n of the variance; `share` is that 1/n for unequal weights
            share = weights / weight**2
            total += (square / weight - scale * float(mean.square().sum())) / (1 - share)
        return max(total, 0.0) if self.sums else None

    def state_dict(self) -> dict[str, Any]:
        return {"listening": self.listening, "means": dict(self.means), "sums": dict(self.sums)}

    def load_state_dict(self, state: Mapping[str, Any], device: torch.device) -> None:
        """Take back what state_dict gave, on the device of the model."""
        self.listening = state["listening"]
        self.means = {name: mean.to(device) for name, mean in state["means"].items()}
        self.sums = {name: tuple(part.to(device) for part in sums) for name, sums in state["sums"].items()}
