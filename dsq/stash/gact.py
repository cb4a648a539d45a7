"""GACT (Liu et al., 2022): any model's saved tensors in few bits, more of them where the gradient is sensitive.

    V(b) = sum_l c_l S(b_l)                 variance that the codes add to the gradient      (equation 5)
    c_l = 0.5 ||g_0 - g_1||^2 / S(b_l)      two gradients, differing in tensor l's seed      (algorithm 1)
    min V(b)  s.t.  sum_l b_l D_l <= B                                                       (equation 4, greedily)

The paper's controller runs the user's closure to get those gradients. Here the loop stays a plain one: the model
inputs, the random state and the gradient at the model's outputs of one step are remembered, and before the next step
the forward is run again, once, with two codes of each tensor, and its backward L + 1 times. Nothing of the user's is
touched by that: no .grad, no buffer, no random stream. It takes about L backwards and twice the stash, every
adapt_interval steps.

Saved tensors are told apart by their order in the forward. Weights, integers, statistics and tensors that need no
gradient stay exact, and a tensor saved twice is encoded once. What the loss saves, between the forward and its
backward, is outside of the steps that can be run again, and the most sensitive there is (section 6.1): it gets 8 bits,
or stays exact where it is small, and the model's tensors share what the budget has left.

Beyond the paper, masks of the ReLU family and of dropout take one bit, exact, on top of the average, and max-pool's
indices their narrowest integers. In the paper a ReLU shares the code of the next layer's input, which rounds small
outputs to zero: at 4 bits the gradient of a ResNet-20 was off by 0.42 of its norm that way, and is by 0.10 with masks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten

from dsq.stash.bit_plan import BitPlan, Layout, Measured
from dsq.stash.codecs import CODECS, EXACT
from dsq.stash.forward_stash import exact_masks, unpack
from dsq.stash.gact_runs import RecomputedRun, ReplayRun, TrainingRun
from dsq.stash.gradient_variance import GradientVariance
from dsq.stash.hooks import around_forward, parameter_storages
from dsq.stash.offload import Swap
from dsq.stash.policy import Controller, Summary, apply, check_keys, register
from dsq.stash.replay import Step, differentiable, sensitivities
from dsq.stash.rules import Rules
from dsq.stash.window import LossWindow

LEVELS = ("L1", "L2", "CB1", "CB2")
_ALARM = 0.5  #: part of the gradient's variance that the codes may make up before the user is warned
_ALARM_AFTER = 20  #: steps from an adaptation to that check: the running mean must have seen the new bits


@register("gact", composes_with=("checkpoint",))
def attach(
    model: nn.Module,
    *,
    bits: float = 4,
    level: str = "L1",
    format: str = "affine",
    adapt_interval: int | None = 1000,
    seed: int = 0,
    swap_dir: str | None = None,
) -> Controller:
    """Keep what autograd saves, from the model's forward to its backward, in `bits` bits a value on average.

    Args:
        bits: B / sum_l D_l of equation 4; scales and minima come on top (0.25 bit; BFP's exponents 0.5).
        level: L1: adaptive bits. L2: and the codes swapped to host memory, fetched ahead in the backward. CB1: L1 and
            activation checkpointing (the policy "checkpoint"; recomputed tensors are coded too, uniformly). CB2: CB1
            and nn.MultiheadAttention through scaled_dot_product_attention (it then returns no weights); attention
            written in another way has to call that function itself.
        format: affine (GACT's, groups of 256, 1 to 8 bits) or bfp (boxes of 16, 2 to 8 bits).
        adapt_interval: steps between two measurements of c_l, the first after the first step; None: the same bits for
            all.
        swap_dir: where L2 makes its files for a model on the CPU; None: the system's directory of temporary files.
    Raises:
        ValueError: an option out of range.
    """
    if level not in LEVELS:
        raise ValueError(f"level={level!r}: accepted are {', '.join(LEVELS)}")
    if format not in CODECS:
        raise ValueError(f"format={format!r}: accepted are {', '.join(CODECS)}")
    codec = CODECS[format]
    number = isinstance(bits, (int, float)) and not isinstance(bits, bool)
    if not number or not codec.widths[0] <= bits <= codec.widths[-1]:
        raise ValueError(f"bits={bits!r}: accepted with format {format!r} are {codec.widths[0]} to {codec.widths[-1]}")
    if adapt_interval is not None and (not isinstance(adapt_interval, int) or adapt_interval < 1):
        raise ValueError(f"adapt_interval={adapt_interval!r}: accepted are None and whole numbers of steps from 1")
    if swap_dir is not None and level != "L2":
        raise ValueError(f"swap_dir={swap_dir!r}: only level 'L2' swaps, this is {level!r}")
    # first: it refuses a model without blocks, which must then be left as it was
    checkpointing = apply(model, "checkpoint") if level in ("CB1", "CB2") else None
    controller = Gact(model, BitPlan(float(bits), codec), adapt_interval, seed, level == "L2", swap_dir)
    around_forward(controller, model, controller.forward)
    # closures: a deep copy of the model shares the controller, where a bound method would be copied with it
    before = model.register_forward_pre_hook(lambda *call: controller.before(*call), prepend=True, with_kwargs=True)
    after = model.register_forward_hook(lambda *call: controller.after(*call))
    for handle in (before, after):
        controller.undo.callback(handle.remove)
    controller.undo.callback(controller.window.take_off)
    if checkpointing is not None:
        controller.undo.callback(checkpointing.remove)
    if level == "CB2":
        for module in model.modules():
            if isinstance(module, nn.MultiheadAttention):
                handle = module.register_forward_pre_hook(_without_weights, with_kwargs=True)
                controller.undo.callback(handle.remove)
    return controller


class Gact(Controller):
    """The plan of bits, the count of steps, and the step that will be run again."""

    def __init__(
        self, model: nn.Module, plan: BitPlan, adapt_interval: int | None, seed: int, swap: bool, swap_dir: str | None
    ) -> None:
        super().__init__(model)
        self.plan, self.adapt_interval, self.seed = plan, adapt_interval, seed
        self.swap, self.swap_dir = swap, swap_dir
        self.step = 0
        self.next_adaptation = 0
        self.pending: Step | None = None
        self.alarm: tuple[int, float] | None = None  #: (step of the check, V(b) expected then)
        self.noise_share: float | None = None  #: of the gradient's variance, at the latest check
        self.window = LossWindow()
        self.variance = GradientVariance(self, ((n, p) for n, p in model.named_parameters() if p.requires_grad))
        self.inputs: Any = ()  #: of the forward that runs
        self.run: TrainingRun | None = None
        self.replay: ReplayRun | None = None
        self.recomputed = 0

    # ---- around the forward ----

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a training forward: adapt if the step remembered is complete, remember this one if one is due."""
        if self.replay is not None or not torch.is_grad_enabled():
            return
        self.window.take_off()
        if self.pending is not None and self.pending.complete and self.pending.training == module.training:
            self.adapt(self.pending)
            self.pending = None
        self.check_alarm()
        self.pending = Step.start(module, args, kwargs) if self.due() else None
        self.inputs = args, kwargs
        self.step += 1

    @contextmanager
    def forward(self) -> Iterator[None]:
        """What is entered around the model's forward, and by a checkpoint around a recomputation in the backward."""
        storages, seed = parameter_storages(self.model), (self.seed, self.step)
        run: TrainingRun | ReplayRun | RecomputedRun
        if torch._C._current_graph_task_id() != -1:
            run = RecomputedRun(self.plan, seed, self._next_recomputed, storages)
        elif self.replay is not None:
            run = self.replay
        else:
            swap = Swap(self.swap_dir) if self.swap else None
            key = _key(self.inputs, self.model.training)
            run = self.run = TrainingRun(self.plan, self.inputs, key, seed, swap, storages)
            self.inputs = ()
        with saved_tensors_hooks(run.stash.pack, unpack), Rules(exact_masks(run.stash)):
            yield

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """After a training forward: watch its loss, and the gradient that comes back."""
        tensors = differentiable(output)
        if self.replay is not None or self.run is None or not torch.is_grad_enabled() or not tensors:
            return
        run = self.run
        run.model_done()
        self.window.open(run.stash.pack, tensors, run.stash.storages)

        def backward_begins(grad: Tensor) -> None:
            self.window.close()
            self.recomputed = 0
            run.learn()

        for tensor in tensors:
            tensor.register_hook(backward_begins)
        if self.pending is not None:
            self.pending.watch(output)

    def _next_recomputed(self) -> int:
        self.recomputed += 1
        return self.recomputed

    # ---- adaptation ----

    def due(self) -> bool:
        """Whether to remember this step: the interval is over, or an unknown list of tensors came up."""
        if self.adapt_interval is None:
            return False
        soonest = self.next_adaptation - self.adapt_interval * 9 // 10
        return self.step >= self.next_adaptation or (not self.plan.complete() and self.step >= soonest)

    def adapt(self, step: Step) -> None:
        """Measure the sensitivity of each tensor on a remembered step (algorithm 1)."""
        inputs = step.args, step.kwargs
        replay = ReplayRun(self.plan, inputs, (self.seed, self.step), parameter_storages(self.model))
        self.replay, self.variance.listening = replay, False
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

            c = sensitivities(gradient, replay.duals, self.plan.factor(replay.width))
        finally:
            self.replay = None
        self.next_adaptation = self.step + (self.adapt_interval or 0)
        if c and all(math.isfinite(value) for value in c):
            self.plan.measured[len(c)] = Measured(tuple(c), tuple(replay.sizes))
            self.variance.restart()
            self.alarm = self.step + _ALARM_AFTER, self.plan.variance(Layout(tuple(replay.sizes), ()))

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
        if self.run is None:
            return Summary(self.name)
        run, measured = self.run, self.plan.measured.get(self.run.model_tensors or 0)
        lines = [f"{run.average_bits():.3f} bits a value on average"]
        for index, (size, bits) in enumerate(zip(run.sizes, run.bits, strict=True)):
            in_model = run.model_tensors is None or index < run.model_tensors
            known = f", c = {measured.c[index]:.3g}" if measured and in_model else ""
            width = "exact" if bits == EXACT else f"{bits} bits"
            lines.append(f"{'model' if in_model else 'loss'} tensor {index}: {size} values, {width}{known}")
        if run.model_tensors is None:
            lines.append("no tensor that needs a gradient was found in the output: bits stay uniform, the loss exact")
        if self.noise_share is not None:
            lines.append(f"the codes make up {self.noise_share:.0%} of the gradient's variance")
        return Summary(self.name, (), run.stash.raw_bytes, run.stash.kept_bytes, tuple(lines))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "next_adaptation": self.next_adaptation,
            "pending": None if self.pending is None else dict(vars(self.pending)),
            "alarm": self.alarm,
            "noise_share": self.noise_share,
            "plan": self.plan.state_dict(),
            "variance": self.variance.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, ("step", "next_adaptation", "pending", "alarm", "noise_share", "plan", "variance"))
        self.step, self.next_adaptation = state["step"], state["next_adaptation"]
        self.pending = None if state["pending"] is None else Step(**state["pending"])
        self.alarm, self.noise_share = state["alarm"], state["noise_share"]
        self.plan.load_state_dict(state["plan"])
        device = next((p.device for p in self.model.parameters()), torch.device("cpu"))
        self.variance.load_state_dict(state["variance"], device)


def _key(inputs: Any, training: bool) -> str:
    """What tells one kind of input from another: shapes and types of its tensors, and the mode of the model."""
    tensors = [leaf for leaf in tree_flatten(inputs)[0] if isinstance(leaf, Tensor)]
    return repr((training, [(tuple(t.shape), str(t.dtype)) for t in tensors]))


def _without_weights(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "need_weights": False}
