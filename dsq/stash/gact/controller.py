"""GACT's controller: the loop watched, the bits adapted, the alarm (__init__.py describes the method)."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from dsq.stash.compiled import backward_again
from dsq.stash.controller import Controller, Summary, check_keys, check_parameters, parameter_shapes
from dsq.stash.gact.bit_plan import BitPlan, SavedSizes, Sensitivities
from dsq.stash.gact.codecs import EXACT
from dsq.stash.gact.forwards import RecomputedForward, ReplayedForward, TrainingForward
from dsq.stash.gact.gradient_variance import GradientVariance
from dsq.stash.gact.offload import Offload
from dsq.stash.gact.replay import RecordedStep, differentiable, sensitivities
from dsq.stash.saved_tensors.forms import get
from dsq.stash.saved_tensors.forward_stash import ForwardStash
from dsq.stash.saved_tensors.hooks import in_backward
from dsq.stash.saved_tensors.rules.few_bits import FEW_BITS
from dsq.stash.saved_tensors.rules.function_mode import Rules
from dsq.stash.saved_tensors.storages import parameter_storages, storages_of
from dsq.stash.saved_tensors.window import LossWindow

_ALARM = 0.5  #: part of the gradient's variance that the codes may make up before the user is warned
_ALARM_AFTER = 20  #: steps from an adaptation to that check: the running mean must have seen the new bits
_STATE = ("parameters", "step", "next_adaptation", "pending", "alarm", "noise_share", "plan", "variance")


class Gact(Controller):
    """The plan of bits, the count of steps, and the step that will be run again."""

    def __init__(
        self, model: nn.Module, plan: BitPlan, adapt_interval: int | None, seed: int, swaps: bool, swap_dir: str | None
    ) -> None:
        super().__init__(model)
        self.plan, self.adapt_interval, self.seed = plan, adapt_interval, seed
        self.swaps, self.swap_dir = swaps, swap_dir
        self.step = 0
        self.next_adaptation = 0
        self.pending: RecordedStep | None = None
        self.alarm: tuple[int, float] | None = None  #: (step of the check, V(b) expected then)
        self.noise_share: float | None = None  #: of the gradient's variance, at the latest check
        self.window = LossWindow()
        self.variance = GradientVariance(self, ((n, p) for n, p in model.named_parameters() if p.requires_grad))
        self.inputs: Any = ()  #: of the forward that runs
        self.latest: tuple[TrainingForward, ForwardStash] | None = None  #: of the training loop
        self.replay: ReplayedForward | None = None
        self.recomputed = 0

    # ---- around the forward ----

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a training forward: adapt if the step remembered is complete, remember this one if one is due."""
        if self.replay is not None or in_backward() or not torch.is_grad_enabled():
            return
        self.window.take_off()
        if self.pending is not None and self.pending.complete and self.pending.training == module.training:
            self.adapt(self.pending)
            self.pending = None
        self.check_alarm()
        self.pending = RecordedStep.start(module, args, kwargs) if self.due() else None
        self.inputs = args, kwargs
        self.step += 1

    @contextmanager
    def context(self) -> Iterator[None]:
        """What is entered around the model's forward, and by a checkpoint around a recomputation in the backward."""
        weights, seed = parameter_storages(self.model), (self.seed, self.step)
        if in_backward():
            self.recomputed += 1
            stash = ForwardStash(RecomputedForward(self.plan, seed, self.recomputed).encode, weights, set())
        elif self.replay is not None:
            stash = ForwardStash(self.replay.encode, weights, storages_of(self.inputs))
        else:
            offload = Offload(self.swap_dir) if self.swaps else None
            run = TrainingForward(self.plan, _key(self.inputs, self.model.training), seed, offload)
            stash = ForwardStash(run.encode, weights, storages_of(self.inputs))
            self.latest = run, stash
        self.inputs = ()
        with saved_tensors_hooks(stash.pack, get), Rules(FEW_BITS, stash.pack_by_rule, stash.note_call):
            yield

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a training forward: watch its loss, and the gradient that comes back."""
        tensors = differentiable(output)
        outside = self.replay is not None or in_backward() or not torch.is_grad_enabled()
        if outside or self.latest is None or not tensors:
            return
        run, stash = self.latest
        run.model_done()
        self.window.open(stash.pack, tensors, stash.weights)

        def backward_begins(grad: Tensor) -> None:
            self.window.close()
            self.recomputed = 0
            run.learn()

        for tensor in tensors:
            tensor.register_hook(backward_begins)
        if self.pending is not None:
            self.pending.watch(output)

    # ---- adaptation ----

    def due(self) -> bool:
        """Whether to remember this step: the interval is over, or an unknown list of tensors came up."""
        if self.adapt_interval is None:
            return False
        soonest = self.next_adaptation - self.adapt_interval * 9 // 10
        return self.step >= self.next_adaptation or (not self.plan.complete() and self.step >= soonest)

    def adapt(self, step: RecordedStep) -> None:
        """Measure the sensitivity of each tensor on a remembered step (algorithm 1)."""
        self.inputs = inputs = step.args, step.kwargs
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

            with backward_again():
                c = sensitivities(gradient, replay.duals, self.plan.factor(replay.width))
        finally:
            self.replay, self.variance.listening = None, listening
        self.next_adaptation = self.step + (self.adapt_interval or 0)
        if c and all(math.isfinite(value) for value in c):
            self.plan.measured[len(c)] = Sensitivities(tuple(c), tuple(replay.sizes))
            self.variance.restart()
            self.alarm = self.step + _ALARM_AFTER, self.plan.variance(SavedSizes(tuple(replay.sizes), ()))

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

    def report(self) -> Summary:
        """The latest training forward: bytes, average bits, bits and sensitivity of each tensor."""
        if self.latest is None:
            return Summary(self.name)
        run, stash = self.latest
        measured = self.plan.measured.get(run.model_tensors or 0)
        lines = [f"{run.average_bits():.3f} bits a value on average, scales and masks aside; {self._budget(run)}"]
        for index, (size, bits) in enumerate(zip(run.sizes, run.bits, strict=True)):
            in_model = run.model_tensors is None or index < run.model_tensors
            known = f", c = {measured.c[index]:.3g}" if measured and in_model else ""
            width = "exact" if bits == EXACT else f"{bits} bits"
            lines.append(f"{'model' if in_model else 'loss'} tensor {index}: {size} values, {width}{known}")
        if run.model_tensors is None:
            lines.append("no tensor that needs a gradient was found in the output: bits stay uniform, the loss exact")
        if run.offload is not None:
            lines.append(f"{run.offload.nbytes / 2**20:.1f} MiB of the codes swapped out of the device's memory")
        if self.noise_share is not None:
            lines.append(f"the codes make up {self.noise_share:.0%} of the gradient's variance")
        return Summary(self.name, (), stash.raw_bytes, stash.kept_bytes, tuple(lines))

    def _budget(self, run: TrainingForward) -> str:
        if run.planned is not None:
            return f"the budget is {self.plan.bits:g}"
        return f"uniform bits within {self.plan.bits:g}, the loss's beyond"

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
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    return repr((training, [(tuple(t.shape), str(t.dtype)) for t in tensors]))
