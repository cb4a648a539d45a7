"""GACT's controller: the loop watched, the bits adapted, the alarm (__init__.py describes the method)."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dsq.stash.codes import Codec
from dsq.stash.controller import check_keys, check_parameters, parameter_shapes
from dsq.stash.gact.codecs import EXACT
from dsq.stash.gact.forwards import RecomputedForward, ReplayedForward, TrainingForward
from dsq.stash.gact.plan import BitPlan, Sensitivities
from dsq.stash.gact.step import GradientVariance, RecordedStep, differentiable, sensitivities
from dsq.stash.interception import TablePolicy, in_backward

_ALARM = 0.5  #: part of the gradient's variance that the codes may make up before the user is warned
_ALARM_AFTER = 20  #: steps from an adaptation to that check: the running mean must have seen the new bits
_STATE = ("parameters", "step", "next_adaptation", "pending", "alarm", "noise_share", "plan", "variance")


class Gact(TablePolicy):
    """The plan of bits, the count of steps, and the step that will be run again."""

    def __init__(self, model: nn.Module, plan: BitPlan, adapt_interval: int | None, seed: int) -> None:
        super().__init__(model)
        self.plan, self.adapt_interval, self.seed = plan, adapt_interval, seed
        self.step = 0
        self.next_adaptation = 0
        self.pending: RecordedStep | None = None
        self.alarm: tuple[int, float] | None = None  #: (step of the check, V(b) expected then)
        self.noise_share: float | None = None  #: of the gradient's variance, at the latest check
        self.variance = GradientVariance(self)
        self.inputs: Any = ()  #: of the forward that runs
        self.run: TrainingForward | None = None  #: the latest of the training loop
        self.replay: ReplayedForward | None = None
        self.recomputed = 0

    # ---- around the forward ----

    def call(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Before a training forward adapt, if the step remembered is complete, and remember this one if one is due;
        after it watch for the gradient that comes back."""
        if self.replay is not None or in_backward() or not torch.is_grad_enabled() or self.is_entered():
            return super().call(module, run, *args, **kwargs)
        if self.pending is not None and self.pending.complete and self.pending.training == module.training:
            self.adapt(self.pending)
            self.pending = None
        self.check_alarm()
        self.pending = RecordedStep.start(module, args, kwargs) if self.due() else None
        self.inputs = args, kwargs
        self.step += 1
        output = super().call(module, run, *args, **kwargs)
        self.inputs, self.recomputed = (), 0
        if self.run is not None:
            self.run.learn()
        if self.pending is not None:
            self.pending.watch(output)
        return output

    def codec(self, module: nn.Module) -> Codec:
        """Of a training forward, of one that is run again, or of what a checkpoint recomputes in the backward."""
        seed = self.seed, self.step
        if in_backward():
            self.recomputed += 1
            return RecomputedForward(self.plan, seed, self.recomputed)
        if self.replay is not None:
            return self.replay
        self.run = TrainingForward(self.plan, _key(self.inputs, self.model.training), seed)
        return self.run

    # ---- adaptation ----

    def due(self) -> bool:
        """Whether to remember this step: the interval is over, or an unknown list of tensors came up."""
        if self.adapt_interval is None:
            return False
        soonest = self.next_adaptation - self.adapt_interval * 9 // 10
        return self.step >= self.next_adaptation or (not self.plan.complete() and self.step >= soonest)

    def adapt(self, step: RecordedStep) -> None:
        """Measure the sensitivity of each tensor on a remembered step (algorithm 1)."""
        inputs = step.args, step.kwargs
        latest = self.latest
        self.replay = replay = ReplayedForward(self.plan, (self.seed, self.step))
        listening, self.variance.listening = self.variance.listening, False
        try:
            with torch.enable_grad():
                outputs, gradients = step.run(self.model)
            if not outputs:
                return
            leaves: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
            leaves = leaves or differentiable(inputs)

            def gradient() -> Sequence[Tensor]:
                self.recomputed = 0  # a checkpoint's codes must be the same in both gradients
                found = torch.autograd.grad(outputs, leaves, gradients, retain_graph=True, allow_unused=True)
                return [g for g in found if g is not None]

            c = sensitivities(gradient, replay.duals, self.plan.factor(self.plan.uniform))
        finally:
            self.replay, self.variance.listening, self.latest = None, listening, latest
        self.next_adaptation = self.step + (self.adapt_interval or 0)
        if c and all(math.isfinite(value) for value in c):
            self.plan.measured[len(c)] = Sensitivities(tuple(c), tuple(replay.sizes))
            self.variance.restart()
            self.alarm = self.step + _ALARM_AFTER, self.plan.variance(tuple(replay.sizes))

    def check_alarm(self) -> None:
        """Warn when the codes' variance dominates the gradient's (end of section 4.2)."""
        if self.alarm is None or self.step < self.alarm[0]:
            return
        expected, self.alarm, self.variance.listening = self.alarm[1], None, False
        overall = self.variance.value({name: p.numel() for name, p in self.model.named_parameters()})
        if not overall:
            return
        self.noise_share = min(expected / overall, 1.0)
        if self.noise_share > _ALARM:
            warnings.warn(
                f"gact: codes of {self.plan.bits:g} bits make up {self.noise_share:.0%} of the gradient's variance; "
                "training may suffer, raise bits",
                stacklevel=2,
            )

    # ---- for the user ----

    def details(self) -> tuple[str, ...]:
        """Average bits, bits and sensitivity of each tensor."""
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
        if self.noise_share is not None:
            lines.append(f"the codes make up {self.noise_share:.0%} of the gradient's variance")
        return tuple(lines)

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": parameter_shapes(self.model),
            "step": self.step,
            "next_adaptation": self.next_adaptation,
            "pending": None if self.pending is None else dict(vars(self.pending)),
            "alarm": self.alarm,
            "noise_share": self.noise_share,
            "plan": self.plan.state_dict(),
            "variance": self.variance.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, _STATE)
        check_parameters(self.name, self.model, state["parameters"])
        self.step, self.next_adaptation = state["step"], state["next_adaptation"]
        self.pending = None if state["pending"] is None else RecordedStep(**state["pending"])
        self.alarm, self.noise_share = state["alarm"], state["noise_share"]
        self.plan.load_state_dict(state["plan"])
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.variance.load_state_dict(state["variance"], device)


def _key(inputs: Any, training: bool) -> str:
    """What tells one kind of input from another: shapes and types of its tensors, and the mode of the model."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return repr((training, [(tuple(t.shape), str(t.dtype)) for t in tensors]))
