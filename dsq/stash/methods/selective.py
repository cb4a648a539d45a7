"""Selective differentiation (memsave): save only the tensors that the requested gradients need. Nothing is rounded.

These rules code nothing. They run where they save less than PyTorch does:

    operation                           saved by PyTorch    saved here
    convolution                         x and the weight    x only if the weight trains
    batch norm by running statistics    x                   x only if the scale trains
    ReLU, leaky, 6, hardtanh, clamp     x or the result     a bit a value
    dropout                             a float a value     a bit a value
    max-pool 2d; average pools 2d       x and places        places in 16 or 32 bits; nothing

(memsave, section 2.2.1; its section 2.2.2 saves ReLU's mask in bytes.) PyTorch itself saves no input of a frozen linear
layer. If the layer behind a ReLU trains, it saves the ReLU's result too, and the bits are 1/32 more than PyTorch saves.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from dsq.stash.controller import Controller, acting_on
from dsq.stash.interception import RulePolicy
from dsq.stash.policy import register
from dsq.stash.rules import RULES, Rule, masks, movement, norms, products
from dsq.stash.stash import Stash


def _if_frozen(rule: Rule, function: Callable[..., Any], position: int) -> Rule:
    """Return ``rule``, and PyTorch's ``function``, which saves x, where the weight, at ``position``, trains."""

    def run(stash: Stash, *args: Any, **kwargs: Any) -> Any:
        weight = kwargs.get("weight", args[position] if len(args) > position else None)
        if weight is not None and weight.requires_grad:
            return function(*args, **kwargs)
        return rule(stash, *args, **kwargs)

    return run


def _batch_norm(stash: Stash, *args: Any, **kwargs: Any) -> Tensor:
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    return F.batch_norm(*args, **kwargs) if training else _frozen_scale(stash, *args, **kwargs)


_frozen_scale = _if_frozen(norms.batch_norm, F.batch_norm, 3)
_BITS = {
    *(
        masks.relu,
        masks.relu_in_place,
        masks.clamp,
        *(RULES[function] for function in (F.leaky_relu, F.relu6, F.hardtanh)),
    ),
    *(masks.dropout, masks.torch_dropout, masks.native_dropout),
    *(*movement.POOLS.values(), movement.adaptive_avg_pool2d, movement.pad),
}
_RULES: dict[Callable[..., Any], Rule] = {
    **{function: rule for function, rule in RULES.items() if rule in _BITS},
    **{function: _if_frozen(RULES[function], function, 1) for function in products.CONVOLUTIONS},
    F.batch_norm: _batch_norm,
}


@register("selective", composes_with=("bfp", "gact", "checkpoint", "wtacrs"))
def attach(model: nn.Module) -> Controller:
    """Save what the differentiable leaves need. No options: each call looks which tensors need a gradient."""
    return Selective(model)


class Selective(RulePolicy):
    """The policy of these rules alone, which codes nothing; another policy with rules takes its place."""

    rules = _RULES

    @contextmanager
    def enter(self, module: nn.Module) -> Iterator[None]:
        if any(policy is not self and isinstance(policy, RulePolicy) for policy in acting_on(module)):
            yield  # whose rules save no more than the leaves need, and that in fewer bits
            return
        with super().enter(module):
            yield
