"""GACT's codecs (dsq/stash/codes.py): of a training forward, of one run again, of a checkpoint's recomputation."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.stash.codes import Code, Decode, Kept
from dsq.stash.gact.codecs import EXACT
from dsq.stash.gact.plan import BitPlan
from dsq.stash.memory import MemoryOrder


def _seed_of(*parts: int | str) -> int:
    """A 32-bit seed (all that PyTorch's CPU generator takes) from what a code is of."""
    return zlib.crc32(repr(parts).encode())


class RecomputedForward:
    """A checkpoint recomputes it in the backward: not measured, in the uniform width."""

    def __init__(self, plan: BitPlan, seed: tuple[int, int], segment: int = 0) -> None:
        self.plan, self.seed, self.segment, self.count = plan, seed, segment, 0

    def encode(self, values: Tensor, order: MemoryOrder, kept: Kept) -> Code | None:
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

    def encode(self, values: Tensor, order: MemoryOrder, kept: Kept) -> Code | None:
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

    def encode(self, values: Tensor, order: MemoryOrder, kept: Kept) -> Code | None:
        self.sizes.append(values.numel())
        index, flat = len(self.sizes), values.reshape(-1)
        first, second = (
            self.plan.family.encode(flat, self.plan.uniform, _seed_of(*self.seed, "replay", index, which))
            for which in (0, 1)
        )
        self.duals.append(Dual((first[1], second[1]), len(first[0])))
        return (*first[0], *second[0]), self.duals[-1]
