"""GACT's codecs of one forward each, and how the sensitivities of its tensors are measured in its backward.

A codec (dsq/stash/codes.py) is made for a training forward, and for a checkpoint's recomputation.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dsq.kept import What
from dsq.stash.codes import Code, Decode
from dsq.stash.gact.plan import EXACT, BitPlan, encode
from dsq.stash.memory import MemoryOrder


def _seed_of(*parts: int | str) -> int:
    """Return a 32-bit seed (all that PyTorch's CPU generator takes) from what a code is of."""
    return zlib.crc32(repr(parts).encode())


class RecomputedForward:
    """A checkpoint recomputes it in the backward: not measured, in the uniform width."""

    def __init__(self, plan: BitPlan, seed: tuple[int, int], segment: int = 0) -> None:
        self.plan, self.seed, self.segment, self.count = plan, seed, segment, 0

    def encode(self, values: Tensor, order: MemoryOrder, what: What) -> Code | None:
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
        self.expected = plan.layouts.get(key)
        self.planned = None if measured else plan.allocation(self.expected)
        self.sizes: list[int] = []
        self.bits: list[int] = []
        self._duals: list[Dual] = []

    def finish(self) -> "list[Dual]":
        """Note what this kind of input makes the model save; give the pairs of codes away."""
        self.plan.layouts[self.key] = tuple(self.sizes)
        duals, self._duals = self._duals, []
        return duals

    def encode(self, values: Tensor, order: MemoryOrder, what: What) -> Code | None:
        index, size, flat = len(self.sizes), values.numel(), values.reshape(-1)
        bits = self._bits(index, size)
        self.sizes.append(size)
        self.bits.append(bits)
        if bits == EXACT:
            return None
        code = encode(flat, bits, _seed_of(*self.seed, index))
        if not self.measured:
            return code
        other = encode(flat, bits, _seed_of(*self.seed, index, "again"))
        dual = Dual((code[1], other[1]), len(code[0]))
        self._duals.append(dual)
        return (*code[0], *other[0]), dual

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


#: (the outputs of a model, the gradients that came back to them)
Measure = Callable[[Sequence[Tensor], Sequence[Tensor | None]], None]


def watched(output: Any, measure: Measure) -> Any:
    """Return a model's output, of which ``measure`` is called once, before the backward goes into the model."""
    leaves, spec = tree_flatten(output)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return output
    found = _Watched.apply(measure, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
    for place, y in zip(places, found, strict=True):
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
            measure(gradients)
        return None, *gradients


def differentiable(tree: Any) -> list[Tensor]:
    """Return the tensors in lists, tuples and dicts that need a gradient."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.requires_grad]


def sensitivities(gradient: Callable[[], Sequence[Tensor]], duals: Sequence[Dual], factor: float) -> list[float]:
    """Return c_l of each saved tensor (GACT, algorithm 1): 0.5 ||g_0 - g_1||^2 / S(b).

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
