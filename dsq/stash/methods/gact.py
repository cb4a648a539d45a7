"""GACT (Liu et al., 2022): any model's saved tensors in few bits, more of them where the gradient is sensitive.

    V(b) = sum_l c_l S(b_l)                 variance that the codes add to the gradient      (equation 5)
    c_l = 0.5 ||g_0 - g_1||^2 / S(b_l)      two gradients, differing in tensor l's seed      (algorithm 1)
    min V(b)  s.t.  sum_l b_l D_l <= B                                                       (equation 4, greedily)

The paper's controller runs the user's closure to get those gradients. Here the loop stays a plain one. Every
adapt_interval steps a forward makes two codes of each tensor, and its backward begins L + 1 more times at the model's
outputs, from the gradients that come back there. That leaves .grad, buffers and random streams as they are; the user's
hooks on tensors and parameters run again. It takes about L backwards and twice the stash.

Which tensors an operation saves, its rule says (dsq/stash/rules). Coded tensors are identified by their order in the
forward. The loss saves exact tensors, the most sensitive of all (section 6.1). The paper's level CB1 is
``apply(model, "checkpoint")`` too, and L2 is ``torch.autograd.graph.save_on_cpu(pin_memory=True)`` around the forward.

Beyond the paper, masks of the ReLU family and of dropout take one bit, exact, on top of the average, and max-pool's
indices their narrowest integers. In the paper a ReLU shares the code of the next layer's input, which rounds small
outputs to zero: at 4 bits the gradient of a ResNet-20 was off by 0.42 of its norm that way, and is by 0.10 with masks.
"""

import math
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dsq.arguments import number, whole_number
from dsq.kernels.backend import AffineCodes, Groups
from dsq.kernels.dispatch import affine_pack, affine_unpack
from dsq.ops.torch_checkpoint import in_backward
from dsq.stash.controller import Controller
from dsq.stash.interception import RulePolicy
from dsq.stash.memory import MemoryOrder
from dsq.stash.policy import register
from dsq.stash.saved_forms import Codec, Decode, Encoded
from dsq.stash_bits import GACT_GROUP, Role

UNCODED = 32  #: the width that stands for a tensor as it is
#: bits that a code may have, narrowest first
WIDTHS = tuple(range(1, 9))


def encode(values_N: Tensor, bits: int, seed: int) -> Encoded:
    """Code, by groups, by q = floor((x - low) / step + u), step = (max - min) / (2^b - 1) (appendix A.4)."""
    count = values_N.numel()
    groups = Groups(GACT_GROUP, -(-count // GACT_GROUP))
    packed = tuple(affine_pack(values_N, bits, groups, None, seed))
    return packed, lambda codes, dtype: affine_unpack(AffineCodes(*codes), bits, groups, count, dtype)


def rounding_variance(bits: int) -> float:
    """Return S(b): how the variance of the rounding depends on the bits (assumption B2); 0 for an exact tensor."""
    return 0.0 if bits == UNCODED else (2.0**bits - 1) ** -2


Counts = tuple[int, ...]  #: values of each tensor that one kind of input makes the model save, in order


@dataclass
class BitPlan:
    """The average, and what was measured: sensitivities by number of tensors, layouts by key of input."""

    bits: float
    measured: dict[int, tuple[tuple[float, ...], Counts]] = field(default_factory=dict)  #: c_l, and the sizes then
    layouts: dict[str, Counts] = field(default_factory=dict)

    @property
    def uniform(self) -> int:
        """Return the widest code within the average: a tensor gets it while nothing is known of the tensor."""
        return max(width for width in WIDTHS if width <= self.bits)

    def allocation(self, sizes: Counts) -> tuple[int, ...]:
        """Return the bits of each tensor, within the average; nothing where their sensitivities are unknown."""
        if len(sizes) not in self.measured:
            return ()
        sensitivities, sizes_then = self.measured[len(sizes)]
        # c_l is a sum over the tensor's values: a longer batch scales it
        c = tuple(
            c * size / max(size_then, 1) for c, size, size_then in zip(sensitivities, sizes, sizes_then, strict=True)
        )
        return allocate(c, sizes, self.bits * sum(sizes), (*WIDTHS, UNCODED))


@lru_cache(maxsize=64)  # of the kinds of input that training has
def allocate(
    sensitivities: tuple[float, ...], sizes: Counts, budget: float, widths: tuple[int, ...]
) -> tuple[int, ...]:
    """Return b_l, each one of ``widths`` (ascending): the least sum_l c_l S(b_l) where sum_l b_l D_l <= budget.

    All tensors start at the narrowest width, and stay there if even that is over the budget. Then widenings are
    made, first those that lower the variance most for each bit they cost, if they fit. With S convex in b that order is
    optimal up to the last widening that fits.
    """
    widenings = []
    for tensor, (c, size) in enumerate(zip(sensitivities, sizes, strict=True)):
        for width, next_width in pairwise(widths) if size else ():
            gain = c * (rounding_variance(width) - rounding_variance(next_width)) / (size * (next_width - width))
            # equal gains (no sensitivity at all, say): the narrowest first, so that the rest is spread evenly
            widenings.append((-gain, width, tensor, next_width))
    bits, remaining = [widths[0]] * len(sizes), budget - widths[0] * sum(sizes)
    for _, width, tensor, next_width in sorted(widenings):
        cost = (next_width - width) * sizes[tensor]
        if bits[tensor] == width and cost <= remaining:  # else the one before did not fit
            bits[tensor], remaining = next_width, remaining - cost
    return tuple(bits)


# ---- forwards, whose tensors have these bits, and the measurement


def _seed_of(*parts: int | str) -> int:
    """Return a 32-bit seed (all that PyTorch's CPU generator takes) from what a code is of."""
    return zlib.crc32(repr(parts).encode())


class RecomputedForward:
    """The codec of a segment that a checkpoint recomputes: uniform bits, no measurement."""

    def __init__(self, plan: BitPlan, seed: tuple[int, int], segment: int = 0) -> None:
        self.plan, self.seed, self.segment, self.count = plan, seed, segment, 0

    def encode(self, values: Tensor, order: MemoryOrder, role: Role) -> Encoded | None:
        self.count += 1
        seed = _seed_of(*self.seed, self.segment, self.count)
        return encode(values.reshape(-1), self.plan.uniform, seed)


class TrainingForward:
    """A forward of the training loop: every tensor in the bits of the plan.

    In one that is ``measured`` every tensor has two codes, of two seeds, in the uniform width (algorithm 1 takes any
    scheme).
    """

    def __init__(self, plan: BitPlan, key: str, seed: tuple[int, int], measured: bool) -> None:
        self.plan, self.key, self.seed, self.measured = plan, key, seed, measured
        self.recomputed = RecomputedForward(plan, seed)
        sizes = plan.layouts.get(key, ())
        self.planned = [] if measured else list(zip(sizes, plan.allocation(sizes), strict=False))  #: sizes and bits
        self.sizes: list[int] = []
        self.bits: list[int] = []
        self._duals: list[Dual] = []

    def finish(self) -> "list[Dual]":
        """Note what this kind of input makes the model save; give the pairs of codes away."""
        self.plan.layouts[self.key] = tuple(self.sizes)
        duals, self._duals = self._duals, []
        return duals

    def encode(self, values: Tensor, order: MemoryOrder, role: Role) -> Encoded | None:
        index, size, flat = len(self.sizes), values.numel(), values.reshape(-1)
        # another list of tensors than this input made before: its bits are not this tensor's
        expected, bits = self.planned[index] if index < len(self.planned) else (size, self.plan.uniform)
        bits = bits if expected == size else self.plan.uniform
        self.sizes.append(size)
        self.bits.append(bits)
        if bits == UNCODED:
            return None
        code = encode(flat, bits, _seed_of(*self.seed, index))
        if not self.measured:
            return code
        other = encode(flat, bits, _seed_of(*self.seed, index, "again"))
        dual = Dual((code[1], other[1]), len(code[0]))
        self._duals.append(dual)
        return (*code[0], *other[0]), dual


@dataclass(eq=False)
class Dual:
    """Reads one of two codes of a tensor, made with two seeds."""

    decode: tuple[Decode, Decode]
    split: int  #: how many tensors the first code has
    second: bool = False

    def __call__(self, codes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return self.decode[self.second](codes[self.split :] if self.second else codes[: self.split], dtype)


#: (the outputs of a model, the gradients that came back to them)
Measure = Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]


def watched(output: Any, measure: Measure) -> Any:
    """Return a model's output, of which ``measure`` is called once, before the backward goes into the model."""
    leaves, spec = tree_flatten(output)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return output
    watched_outputs = _Watched.apply(measure, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, y in zip(places, watched_outputs, strict=True):
        leaves[place] = y
    return tree_unflatten(leaves, spec)


class _Watched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, measure: Measure, *outputs: Tensor) -> tuple[Tensor, ...]:
        ctx.measure = partial(measure, outputs)
        ctx.set_materialize_grads(False)
        return tuple(torch.ops.aten._unsafe_view(y, y.shape) for y in outputs)  # views could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        measure, ctx.measure = ctx.measure, None
        if measure is not None and not torch.is_grad_enabled():
            # of is_grads_batched=True, a gradient stands for several, none of which is a training step's
            is_batched = any(g is not None and torch._C._functorch.is_legacy_batchedtensor(g) for g in gradients)
            if not is_batched:
                measure(gradients)
        return None, *gradients


def sensitivities(gradient: Callable[[], Sequence[Tensor]], duals: Sequence[Dual], variance: float) -> list[float]:
    """Return c_l of each saved tensor (GACT, algorithm 1), with ``variance`` the S(b) of the bits they all have.

    ``gradient`` computes the parameters' gradient from the codes that ``duals`` read, all of them the first at the end.
    """
    first = [g.clone() for g in gradient()]
    result = []
    for dual in duals:
        dual.second = True
        try:
            distance = _squared_distance(first, gradient())
        finally:
            dual.second = False
        result.append(0.5 * distance / variance)
    return result


def _squared_distance(first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """Return the sum of (a - b)^2, a MiB at a time: in float64 an embedding's gradient takes much memory."""
    pairs = ((a.reshape(-1).split(1 << 18), b.reshape(-1).split(1 << 18)) for a, b in zip(first, second, strict=True))
    return sum(float((a - b).double().square().sum()) for pair in pairs for a, b in zip(*pair, strict=True))


class Gact(RulePolicy):
    """Codes in the bits that the plan gives each tensor of a forward. Measures sensitivities every ``adapt_interval``
    steps, and plans anew."""

    by_parts = False

    def __init__(self, model: nn.Module, plan: BitPlan, adapt_interval: int | None, seed: int) -> None:
        super().__init__(model)
        self.plan, self.adapt_interval, self.seed = plan, adapt_interval, seed
        self.step = 0
        self.next_adaptation: int | None = None  #: the step to measure; None before a gradient has come back
        self.inputs: Any = ()  #: of the forward that runs
        self.run: TrainingForward | None = None  #: the latest of the training loop
        self.recomputed = 0

    def run_forward(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model; where its tensors have two codes, measure them when the gradient comes back."""
        if in_backward():
            return super().run_forward(module, run, *args, **kwargs)
        self.inputs = args, kwargs
        output = super().run_forward(module, run, *args, **kwargs)
        self.inputs, self.recomputed = (), 0
        assert self.run is not None
        duals = self.run.finish()
        if not duals and (self.next_adaptation is not None or self.adapt_interval is None):
            return output
        trained: list[Tensor] = [p for p in self.model.parameters() if p.requires_grad]
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.requires_grad]
        return watched(output, partial(self.adapt, self.run, duals, trained or inputs))

    def codec(self, module: nn.Module) -> Codec:
        """Return the codec of a training forward, or of what a checkpoint recomputes in the backward."""
        if in_backward():
            self.recomputed += 1
            return RecomputedForward(self.plan, (self.seed, self.step), self.recomputed)
        due = self.next_adaptation is not None and self.step >= self.next_adaptation
        key = _key(self.inputs, self.model.training)
        self.step += 1
        self.run = TrainingForward(self.plan, key, (self.seed, self.step), due and self.adapt_interval is not None)
        return self.run

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
        pairs = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if dy is not None]
        if self.run is not run or not all(bool(dy.isfinite().all()) for _, dy in pairs):
            return
        self.next_adaptation = self.step + (self.adapt_interval or 0 if duals else 0)
        if not duals:
            return

        def gradient() -> Sequence[Tensor]:
            self.recomputed = 0  # a checkpoint's codes must be the same in both gradients
            roots, root_gradients = zip(*pairs, strict=True)
            of_leaves = torch.autograd.grad(roots, leaves, root_gradients, retain_graph=True, allow_unused=True)
            return [g for g in of_leaves if g is not None]

        try:
            c = sensitivities(gradient, duals, rounding_variance(self.plan.uniform))
        except RuntimeError as error:  # PyTorch's, fairseq's, Megatron's and DeepSpeed's refuse torch.autograd.grad
            if ".grad()" not in str(error):
                raise
            text = "gact measures no sensitivities behind checkpoints with use_reentrant=True: all tensors get the"
            warnings.warn(f"{text} same bits; use_reentrant=False lets it measure", stacklevel=2)
            return
        finally:
            self.recomputed = 0
        if c and all(math.isfinite(value) for value in c):
            self.plan.measured[len(c)] = tuple(c), tuple(run.sizes)

    def details(self) -> tuple[str, ...]:
        """Return the average of the latest forward's bits, and the budget."""
        run = self.run
        if run is None:
            return ()
        budget = f"the budget is {self.plan.bits:g}" if run.planned else f"uniform bits within {self.plan.bits:g}"
        average = sum(b * d for b, d in zip(run.bits, run.sizes, strict=True)) / max(sum(run.sizes), 1)
        return (f"{average:.3f} bits a value on average, scales and masks aside; {budget}",)

    def state_dict(self) -> dict[str, Any]:
        plan = {"measured": dict(self.plan.measured), "layouts": dict(self.plan.layouts)}
        return {"step": self.step, "next_adaptation": self.next_adaptation, "plan": plan}

    def take(self, state: Mapping[str, Any]) -> None:
        self.step, self.next_adaptation, plan = state["step"], state["next_adaptation"], state["plan"]
        self.plan.measured, self.plan.layouts = dict(plan["measured"]), dict(plan["layouts"])


def _key(inputs: Any, training: bool) -> str:
    """Return what tells one kind of input from another: shapes and types of its tensors, and the mode of the model."""
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    return repr((training, [(tuple(t.shape), str(t.dtype)) for t in tensors]))


@register("gact", composes_with=("checkpoint", "selective"))
def attach(
    model: nn.Module,
    *,
    bits: float = 4,
    adapt_interval: int | None = 1000,
    seed: int = 0,
) -> Controller:
    """Keep what the table's operations save while the model's forward runs, in `bits` bits a value on average.

    Args:
        bits: B / sum_l D_l of equation 4; scales and minima come on top (0.25 bit). Until c_l was measured
            all tensors have the widest code within it.
        adapt_interval: steps between two measurements of c_l, the first in the second step; None: the same bits for
            all.
    Raises:
        ValueError: an option out of range.
    """
    number("bits", bits, least=WIDTHS[0], most=WIDTHS[-1])
    adapt_interval = None if adapt_interval is None else whole_number("adapt_interval", adapt_interval, 1)
    seed = whole_number("seed", seed)
    return Gact(model, BitPlan(float(bits)), adapt_interval, seed)
