"""The variance of the training gradient, from a running mean over the steps, on a sample of its coordinates."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from dsq.stash.policy import Controller

_SAMPLED = (
    1024  #: coordinates of each parameter, evenly spaced: a running mean of all would cost as much as the parameters
)
_DECAY = 0.9
_FEWEST = 10  #: gradients before which no variance is told


class GradientVariance:
    """Var[g] = E||g||^2 - ||E g||^2, exponential means over the latest gradients as they reach the parameters.

    While `paused`, gradients pass unnoticed. Non-finite ones (a loss scaler's overflow) always do.
    """

    def __init__(self, controller: Controller, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.paused = False
        self.means: dict[str, Tensor] = {}  #: of the sampled coordinates
        self.sums: dict[str, Tensor] = {}  #: mean of ||g||^2, sum of the weights, sum of their squares
        for name, parameter in parameters:
            handle = parameter.register_hook(lambda grad, name=name: self._note(name, grad))
            controller.undo.callback(handle.remove)

    def _note(self, name: str, grad: Tensor) -> None:
        if self.paused or not grad.numel():
            return
        sample = grad.detach().reshape(-1)[:: max(1, grad.numel() // _SAMPLED)].float()
        square = sample.square().sum() * (grad.numel() / sample.numel())
        mean = self.means.get(name, torch.zeros_like(sample)).to(sample)
        sums = self.sums.get(name, square.new_zeros(3)).to(square)
        decay = square.new_tensor([_DECAY, _DECAY, _DECAY**2])
        new = torch.stack([(1 - _DECAY) * square, square.new_tensor(1 - _DECAY), square.new_tensor((1 - _DECAY) ** 2)])
        finite = square.isfinite()
        self.means[name] = torch.where(finite, _DECAY * mean + (1 - _DECAY) * sample, mean)
        self.sums[name] = torch.where(finite, decay * sums + new, sums)

    def value(self, sizes: Mapping[str, int]) -> float | None:
        """The variance, summed over the parameters; None before ten gradients came.

        sizes: values of each parameter, by name.
        """
        total = 0.0
        for name, (square, weight, squared_weights) in ((n, s.tolist()) for n, s in self.sums.items()):
            if weight < 1 - _DECAY**_FEWEST * 1.001:
                return None
            mean = self.means[name] / weight
            scale = sizes[name] / mean.numel()
            # a mean of n gradients carries 1/n of the variance; `share` is that 1/n for unequal weights
            share = squared_weights / weight**2
            total += (square / weight - scale * float(mean.square().sum())) / (1 - share)
        return max(total, 0.0) if self.sums else None

    def state_dict(self) -> dict[str, dict[str, Tensor]]:
        return {"means": dict(self.means), "sums": dict(self.sums)}

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        self.means, self.sums = dict(state["means"]), dict(state["sums"])
