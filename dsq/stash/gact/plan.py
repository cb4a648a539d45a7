"""Which codes GACT has, and how many bits each saved tensor gets: the integer program (equation 4), solved greedily."""

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dsq.formats import FORMATS, Format, named
from dsq.formats.base import BoxFormat
from dsq.kept import GACT_GROUP
from dsq.kernels.backend import AffineCodes, Groups
from dsq.kernels.dispatch import affine_pack, affine_unpack
from dsq.packing import quantize
from dsq.stash.codes import Code, in_boxes

EXACT = 32  #: the width that stands for "kept as it is"


@dataclass(frozen=True)
class CodeFamily:
    """A family of codes by bits a value, rounded stochastically."""

    #: (N,) values, bits, seed -> code
    encode: Callable[[Tensor, int, int], Code]
    #: S(b): how the variance of the rounding depends on the bits (assumption B2 of GACT)
    factor: Callable[[int], float]
    #: the widths it has, narrowest first
    widths: tuple[int, ...]


def _affine(values_N: Tensor, bits: int, seed: int) -> Code:
    """GACT's quantiser (appendix A.4): q = floor((x - low) / step + u), step = (max - min) / (2^b - 1), by groups."""
    count = values_N.numel()
    groups = Groups(GACT_GROUP, -(-count // GACT_GROUP))
    packed = tuple(affine_pack(values_N, bits, groups, None, seed))
    return packed, lambda codes, dtype: affine_unpack(AffineCodes(*codes), bits, groups, count, dtype)


def _boxes(name: str) -> CodeFamily:
    """A block format in boxes of 16."""
    formats = {bits: named(name, bits) for bits in range(2, 9)}

    def encode(values_N: Tensor, bits: int, seed: int) -> Code:
        return in_boxes(values_N, formats[bits], seed)

    return CodeFamily(encode, lambda bits: _variance(formats[bits]), tuple(formats))


@cache
def _variance(fmt: Format) -> float:
    """Variance of rounding normal values to ``fmt``, from two roundings.

    No law holds for all formats and widths: another bit does not halve sbfp's step, snvint is bfp above 6 bits, and at
    2 bits, where most values are less than a step, the variance is less than the step's square says.
    """
    x = torch.randn(1 << 14, generator=torch.Generator().manual_seed(0), device="cpu")
    first, second = (quantize(x, fmt, rounding="stochastic", seed=seed) for seed in (0, 1))
    return 0.5 * float((first - second).square().mean())


CODE_FAMILIES = {
    # step = range / (2^b - 1)
    "affine": CodeFamily(_affine, lambda bits: (2.0**bits - 1) ** -2, tuple(range(1, 9))),
    **{name: _boxes(name) for name, kind in FORMATS.items() if issubclass(kind, BoxFormat)},
}


Sizes = tuple[int, ...]  #: values of each tensor that one kind of input makes the model save, in order


@dataclass(frozen=True)
class Sensitivities:
    """Sensitivities c_l of the tensors of a forward, and the sizes those had."""

    c: tuple[float, ...]
    sizes: tuple[int, ...]


@dataclass
class BitPlan:
    """The average, the code, and what was measured: sensitivities by number of tensors, layouts by key of input."""

    bits: float
    family: CodeFamily
    measured: dict[int, Sensitivities] = field(default_factory=dict)
    layouts: dict[str, Sizes] = field(default_factory=dict)
    #: allocations by layout, and what they were made of
    _allocated: dict[Sizes, tuple[Sensitivities, tuple[int, ...]]] = field(default_factory=dict)

    @property
    def uniform(self) -> int:
        """The widest code within the average: a tensor gets it while nothing is known of the tensor."""
        return max(width for width in self.family.widths if width <= self.bits)

    def factor(self, bits: int) -> float:
        """S(b); 0 for a tensor kept as it is."""
        return 0.0 if bits == EXACT else self.family.factor(bits)

    def complete(self) -> bool:
        """Whether the sensitivities of all known layouts were measured."""
        return all(len(sizes) in self.measured for sizes in self.layouts.values())

    def allocation(self, sizes: Sizes | None) -> tuple[int, ...] | None:
        """Bits of each tensor, within the average. None: unknown."""
        measured = None if sizes is None else self.measured.get(len(sizes))
        if sizes is None or measured is None:
            return None
        made_of, bits = self._allocated.get(sizes, (None, ()))
        if made_of is not measured:
            # c_l is a sum over the tensor's values: a longer batch scales it
            c = [c * d / max(size, 1) for c, d, size in zip(measured.c, sizes, measured.sizes, strict=True)]
            bits = allocate(c, sizes, self.bits * sum(sizes), (*self.family.widths, EXACT), self.factor)
            self._allocated[sizes] = measured, bits
        return bits

    def state_dict(self) -> dict[str, Any]:
        return {
            "measured": {count: asdict(measured) for count, measured in self.measured.items()},
            "layouts": dict(self.layouts),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.measured = {count: Sensitivities(**measured) for count, measured in state["measured"].items()}
        self.layouts = {key: tuple(sizes) for key, sizes in state["layouts"].items()}


def allocate(
    sensitivities: Sequence[float],
    sizes: Sequence[int],
    budget: float,
    widths: Sequence[int],
    factor: Callable[[int], float],
) -> tuple[int, ...]:
    """Minimise sum_l c_l S(b_l) subject to sum_l b_l D_l <= budget.

    All tensors start at the narrowest width; then the widening that lowers the variance most for each bit it costs is
    made, as long as one fits. With S convex in b that order is optimal up to the last widening that fits; O(L log L).

    Args:
        sensitivities: c_l; 0 leaves a tensor as narrow as the budget needs.
        sizes: D_l, values of each tensor.
        budget: bits for all together.
        widths: the bits a tensor may have, ascending.
        factor: S(b).
    Returns:
        b_l for each tensor; all of the narrowest width where even that is over the budget.
    """
    bits = [widths[0]] * len(sizes)
    left = budget - sum(b * d for b, d in zip(bits, sizes, strict=True))

    def step(tensor: int, index: int) -> tuple[float, float, int, int]:
        here, there = widths[index], widths[index + 1]
        gain = sensitivities[tensor] * (factor(here) - factor(there)) / (sizes[tensor] * (there - here))
        # equal gains (no sensitivity at all, say): the narrowest first, so that the rest is spread evenly
        return (-gain, here, tensor, index)

    heap = [step(tensor, 0) for tensor in range(len(sizes)) if len(widths) > 1 and sizes[tensor]]
    heapq.heapify(heap)
    while heap:
        _, _, tensor, index = heapq.heappop(heap)
        cost = (widths[index + 1] - widths[index]) * sizes[tensor]
        if cost > left:
            continue
        left -= cost
        bits[tensor] = widths[index + 1]
        if index + 2 < len(widths):
            heapq.heappush(heap, step(tensor, index + 1))
    return tuple(bits)
