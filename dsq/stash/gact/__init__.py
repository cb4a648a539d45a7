"""GACT (Liu et al., 2022): any model's saved tensors in few bits, more of them where the gradient is sensitive.

    V(b) = sum_l c_l S(b_l)                 variance that the codes add to the gradient      (equation 5)
    c_l = 0.5 ||g_0 - g_1||^2 / S(b_l)      two gradients, differing in tensor l's seed      (algorithm 1)
    min V(b)  s.t.  sum_l b_l D_l <= B                                                       (equation 4, greedily)

The paper's controller runs the user's closure to get those gradients. Here the loop stays a plain one. Every
adapt_interval steps a forward makes two codes of each tensor, and its backward begins L + 1 more times at the model's
outputs, from the gradients that come back there. That leaves .grad, buffers and random streams as they are; the user's
hooks on tensors and parameters run again. It takes about L backwards and twice the stash.

What each operation keeps is the table's (dsq/stash/table). Coded tensors are told apart by their order in the forward.
What the loss keeps stays exact: it is the most sensitive there is (section 6.1). The paper's level L2 is PyTorch's
``torch.autograd.graph.save_on_cpu(pin_memory=True)`` around the forward.

Beyond the paper, masks of the ReLU family and of dropout take one bit, exact, on top of the average, and max-pool's
indices their narrowest integers. In the paper a ReLU shares the code of the next layer's input, which rounds small
outputs to zero: at 4 bits the gradient of a ResNet-20 was off by 0.42 of its norm that way, and is by 0.10 with masks.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsq.arguments import choice, number, whole_number
from dsq.stash.codes import Codec
from dsq.stash.controller import RUNNING, Controller
from dsq.stash.gact.plan import EXACT, WIDTHS, BitPlan, Sensitivities, factor
from dsq.stash.gact.step import Dual, RecomputedForward, TrainingForward, differentiable, sensitivities, watched
from dsq.stash.interception import TablePolicy, in_backward
from dsq.stash.policy import apply, register

LEVELS = ("L1", "CB1", "CB2")


class Gact(TablePolicy):
    """The plan of bits of a whole forward's tensors, and the count of steps."""

    by_parts = False

    def __init__(self, model: nn.Module, plan: BitPlan, adapt_interval: int | None, seed: int) -> None:
        super().__init__(model)
        self.plan, self.adapt_interval, self.seed = plan, adapt_interval, seed
        self.step = 0
        self.next_adaptation: int | None = None  #: the step to measure; None before a gradient has come back
        self.inputs: Any = ()  #: of the forward that runs
        self.run: TrainingForward | None = None  #: the latest of the training loop
        self.recomputed = 0

    # ---- around the forward ----

    def call(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model; where its tensors have two codes, measure them when the gradient comes back."""
        if in_backward() or not torch.is_grad_enabled() or RUNNING.suspended or self in RUNNING.entered:
            return super().call(module, run, *args, **kwargs)
        self.inputs = args, kwargs
        output = super().call(module, run, *args, **kwargs)
        self.inputs, self.recomputed = (), 0
        assert self.run is not None
        duals = self.run.finish()
        if not duals and (self.next_adaptation is not None or self.adapt_interval is None):
            return output
        leaves = [p for p in self.model.parameters() if p.requires_grad] or differentiable((args, kwargs))
        return watched(output, partial(self.adapt, self.run, duals, leaves))

    def codec(self, module: nn.Module) -> Codec:
        """Return the codec of a training forward, or of what a checkpoint recomputes in the backward."""
        if in_backward():
            self.recomputed += 1
            return RecomputedForward(self.plan, (self.seed, self.step), self.recomputed)
        due, key = self.due(), _key(self.inputs, self.model.training)
        self.step += 1
        self.run = TrainingForward(self.plan, key, (self.seed, self.step), measured=due)
        return self.run

    # ---- adaptation ----

    def due(self) -> bool:
        """Return whether to measure this step: the interval is over, or an unknown list of tensors came up."""
        if self.adapt_interval is None or self.next_adaptation is None:
            return False
        soonest = self.next_adaptation - self.adapt_interval * 9 // 10
        return self.step >= self.next_adaptation or (not self.plan.complete() and self.step >= soonest)

    def adapt(
        self,
        run: TrainingForward,
        duals: Sequence[Dual],
        leaves: Sequence[Tensor],
        outputs: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
    ) -> None:
        """Measure the sensitivity of each tensor (algorithm 1) from the gradients at the outputs.

        Nothing is measured where one is not finite (a scaler's overflow), or where another forward has begun since.
        """
        came = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None]
        if self.run is not run or not all(bool(dy.isfinite().all()) for _, dy in came):
            return
        self.next_adaptation = self.step + (self.adapt_interval or 0 if duals else 0)
        if not duals:
            return

        def gradient() -> Sequence[Tensor]:
            self.recomputed = 0  # a checkpoint's codes must be the same in both gradients
            roots, given = zip(*came, strict=True)
            found = torch.autograd.grad(roots, leaves, given, retain_graph=True, allow_unused=True)
            return [g for g in found if g is not None]

        c = sensitivities(gradient, duals, factor(self.plan.uniform))
        self.recomputed = 0
        if c and all(math.isfinite(value) for value in c):
            self.plan.measured[len(c)] = Sensitivities(tuple(c), tuple(run.sizes))

    # ---- for the user ----

    def details(self) -> tuple[str, ...]:
        """Return the average bits, bits and sensitivity of each tensor."""
        run = self.run
        if run is None:
            return ()
        measured = self.plan.measured.get(len(run.sizes))
        budget = f"the budget is {self.plan.bits:g}" if run.planned else f"uniform bits within {self.plan.bits:g}"
        average = sum(b * d for b, d in zip(run.bits, run.sizes, strict=True)) / max(sum(run.sizes), 1)
        lines = [f"{average:.3f} bits a value on average, scales and masks aside; {budget}"]
        for index, (size, bits) in enumerate(zip(run.sizes, run.bits, strict=True)):
            known = f", c = {measured.c[index]:.3g}" if measured else ""
            lines.append(f"tensor {index}: {size} values, {'exact' if bits == EXACT else f'{bits} bits'}{known}")
        return tuple(lines)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "next_adaptation": self.next_adaptation, "plan": self.plan.state_dict()}

    def take(self, state: Mapping[str, Any]) -> None:
        self.step, self.next_adaptation = state["step"], state["next_adaptation"]
        self.plan.load_state_dict(state["plan"])


def _key(inputs: Any, training: bool) -> str:
    """Return what tells one kind of input from another: shapes and types of its tensors, and the mode of the model."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return repr((training, [(tuple(t.shape), str(t.dtype)) for t in tensors]))


@register("gact", composes_with=("checkpoint", "selective"))
def attach(
    model: nn.Module,
    *,
    bits: float = 4,
    level: str = "L1",
    adapt_interval: int | None = 1000,
    seed: int = 0,
) -> Controller:
    """Keep what the table's operations save while the model's forward runs, in `bits` bits a value on average.

    Args:
        bits: B / sum_l D_l of equation 4; scales and minima come on top (0.25 bit). Until c_l was measured
            all tensors have the widest code within it.
        level: L1: adaptive bits. CB1: L1 and checkpointing (the policy "checkpoint"; recomputed tensors are coded too,
            uniformly). CB2: CB1 and nn.MultiheadAttention through scaled_dot_product_attention (it then returns no
            weights); attention written in another way has to call that function itself.
        adapt_interval: steps between two measurements of c_l, the first in the second step; None: the same bits for
            all.
    Raises:
        ValueError: an option out of range.
    """
    choice("level", level, LEVELS)
    number("bits", bits, least=WIDTHS[0], most=WIDTHS[-1])
    adapt_interval = None if adapt_interval is None else whole_number("adapt_interval", adapt_interval, 1)
    seed = whole_number("seed", seed)
    # first: it refuses a model without blocks, which must then be left as it was
    checkpointing = apply(model, "checkpoint") if level in ("CB1", "CB2") else None
    controller = Gact(model, BitPlan(float(bits)), adapt_interval, seed)
    if checkpointing is not None:
        controller.hooks.append(checkpointing)
    if level == "CB2":
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                controller.hooks.append(module.register_forward_pre_hook(_without_weights, with_kwargs=True))
    return controller


def _without_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "need_weights": False}
