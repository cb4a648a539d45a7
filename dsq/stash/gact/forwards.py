"""What GACT does with the saved tensors of one forward: in training, when it is run again, and in a recomputation.

Each is the codec of a Stash (dsq/stash/codes.py).
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.stash.codes import Decode, Kept
from dsq.stash.gact.bit_plan import BitPlan
from dsq.stash.gact.codecs import EXACT, Code
from dsq.stash.gact.offload import Offload
from dsq.stash.memory_order import MemoryOrder


def seed_of(*parts: int | str) -> int:
    """A 32-bit seed (all that PyTorch's CPU generator takes) from what a code is of."""
    return zlib.crc32(repr(parts).encode())


class TrainingForward:
    """A forward of the training loop."""

    def __init__(self, plan: BitPlan, key: str, seed: tuple[int, int], offload: Offload | None) -> None:
        self.plan, self.key, self.seed, self.offload = plan, key, seed, offload
        self.recomputed = RecomputedForward(plan, seed, 0)
        self.expected = plan.layouts.get(key)
        self.planned = plan.allocation(self.expected)
        self.sizes: list[int] = []
        self.bits: list[int] = []

    def learn(self) -> None:
        """The forward is over: note what this kind of input makes the model save."""
        self.plan.layouts[self.key] = tuple(self.sizes)

    def average_bits(self) -> float:
        return sum(b * d for b, d in zip(self.bits, self.sizes, strict=True)) / max(sum(self.sizes), 1)

    def encode(self, values: Tensor, order: MemoryOrder, kept: Kept) -> Code | None:
        index, size = len(self.sizes), values.numel()
        bits = self._bits(index, size)
        self.sizes.append(size)
        self.bits.append(bits)
        if bits == EXACT:
            return None
        code = self.plan.codec.encode(values.reshape(-1), bits, seed_of(*self.seed, index))
        return code if self.offload is None else self.offload(code)

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
        self.codec, self.width, self.seed = plan.codec, plan.uniform, seed
        self.recomputed = RecomputedForward(plan, seed, 0)
        self.duals: list[Dual] = []
        self.sizes: list[int] = []

    def encode(self, values: Tensor, order: MemoryOrder, kept: Kept) -> Code:
        self.sizes.append(values.numel())
        index, flat = len(self.sizes), values.reshape(-1)
        first, second = (
            self.codec.encode(flat, self.width, seed_of(*self.seed, "replay", index, which)) for which in (0, 1)
        )
        self.duals.append(Dual((first[1], second[1]), len(first[0])))
        return (*first[0], *second[0]), self.duals[-1]


class RecomputedForward:
    """What a checkpoint recomputes in the backward: not measured, in the uniform width."""

    def __init__(self, plan: BitPlan, seed: tuple[int, int], segment: int) -> None:
        self.codec, self.width, self.seed, self.segment = plan.codec, plan.uniform, seed, segment
        self.count = 0

    def encode(self, values: Tensor, order: MemoryOrder, kept: Kept) -> Code:
        self.count += 1
        return self.codec.encode(values.reshape(-1), self.width, seed_of(*self.seed, self.segment, self.count))
