"""Selective differentiation (memsave): keep only what the leaves that want a gradient need. Gradients are PyTorch's,
bit for bit; what is kept is never more than PyTorch keeps.

The rules (layer_rules.py has the table) act around each call of a layer's function while the model's forward runs, so
layers, shared layers, subclasses and bare F.relu calls are all covered, and no module is replaced.

A ReLU's 1-bit mask costs bytes where the next layer keeps the ReLU's output anyway (everything trains: 1/32 more).
Such a mask is given up as soon as another op keeps the same memory: the ReLU then shares that.
"""

from torch import nn

from dsq.stash.controller import Controller
from dsq.stash.interception import intercept
from dsq.stash.policy import register
from dsq.stash.selective.controller import Selective


@register("selective", composes_with=("bfp", "gact", "checkpoint", "wtacrs"))
def attach(model: nn.Module) -> Controller:
    """Keep what the differentiable leaves need. No options: who needs a gradient is asked at each call."""
    controller = Selective(model)
    intercept(controller, model)
    return controller
