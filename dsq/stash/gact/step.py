"""GACT's codecs of one forward each, and what it measures of the training loop.

A codec (dsq/stash/codes.py) is made for a training forward, for a forward run again, for a checkpoint's recomputation.
A step of the loop is remembered to be run again.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from dsq.kept import What
from dsq.stash.codes import Code, Decode
from dsq.stash.gact.plan import EXACT, BitPlan
from dsq.stash.memory import MemoryOrder


def _seed_of(*parts: int | str) -> int:
    """A 32-bit seed (all that PyTorch's CPU generator takes) from what a code is of."""
    return zlib.crc32(repr(parts).encode())


class RecomputedForward:
    """A checkpoint recomputes it in the backward: not measured, in the uniform width."""

    def __init__(self, plan: BitPlan, seed: tuple[int, int], segment: int = 0) -> None:
        self.plan, self.seed, self.segment, self.count = plan, seed, segment, 0

    def encode(self, values: Tensor, order: MemoryOrder, what: What) -> Code | None:
        self.count += 1
        seed = _seed_of(*self.seed, self.segment, self.count)
        return self.plan.family.encode(values.reshape(-1), self.plan.uniform, seed)


class TrainingForward:
    """A forward of the training loop: every tensor in the bits of the plan."""

    def __init__(self, plan: BitPlan, key: str, seed: tuple[int, int]) -> None:
        self.plan, self.key, self.seed = plan, key, seed
        self.recomputed = RecomputedForward(plan, seed)
        self.expected = plan.layouts.get(key)
        self.planned = plan.allocation(self.expected)
        self.sizes: list[int] = []
        self.bits: list[int] = []

    def learn(self) -> None:
        """The forward is over: note what this kind of input makes the model save."""
        self.plan.layouts[self.key] = tuple(self.sizes)

    def encode(self, values: Tensor, order: MemoryOrder, what: What) -> Code | None:
        index, size = len(self.sizes), values.numel()
        bits = self._bits(index, size)
        self.sizes.append(size)
        self.bits.append(bits)
        if bits == EXACT:
            return None
        return self.plan.family.encode(values.reshape(-1), bits, _seed_of(*self.seed, index))

    def _bits(self, index: int, size: int) -> int:
        if self.planned is None or self.expected is None:
            return self.plan.uniform
        # another list of tensors than this input made before: its bits are not this tensor's
        as_expected = index < len(self.planned) and self.expected[index] == size
        return self.planned[index] if as_expected else self.plan.uniform


@dataclass(eq=False)
class Dual:
    """Reads one of two codes of a tensor, made with two seeds."""

    decode: tuple[Decode, Decode]
    split: int  #: how many tensors the first code has
    second: bool = False

    def __call__(self, codes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return self.decode[self.second](codes[self.split :] if self.second else codes[: self.split], dtype)


class ReplayedForward:
    """A forward run again: every tensor in the uniform width (algorithm 1 takes any scheme), with two seeds."""

    def __init__(self, plan: BitPlan, seed: tuple[int, int]) -> None:
        self.plan, self.seed = plan, seed
        self.recomputed = RecomputedForward(plan, seed)
        self.duals: list[Dual] = []
        self.sizes: list[int] = []

    def encode(self, values: Tensor, order: MemoryOrder, what: What) -> Code | None:
        self.sizes.append(values.numel())
        index, flat = len(self.sizes), values.reshape(-1)
        first, second = (
            self.plan.family.encode(flat, self.plan.uniform, _seed_of(*self.seed, "replay", index, which))
            for which in (0, 1)
        )
        self.duals.append(Dual((first[1], second[1]), len(first[0])))
        return (*first[0], *second[0]), self.duals[-1]


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
