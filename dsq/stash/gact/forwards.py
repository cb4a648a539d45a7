"""What GACT does with the saved tensors of one forward: in training, when it is run again, and in a recomputation.

encode() is the encoder of a ForwardStash, which holds its run; no run holds a stash (the cycle would keep it).
"""

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor

from dsq.stash.gact.bit_plan import BitPlan, SavedSizes
from dsq.stash.gact.codecs import EXACT
from dsq.stash.gact.offload import Offload
from dsq.stash.saved_tensors.forward_stash import Code
from dsq.stash.saved_tensors.memory_order import MemoryOrder


def seed_of(*parts: int | str) -> int:
    """A 32-bit seed (all that PyTorch's CPU generator takes) from what a code is of."""
    return zlib.crc32(repr(parts).encode())


class TrainingForward:
    """A forward of the training loop, then its loss."""

    def __init__(self, plan: BitPlan, key: str, seed: tuple[int, int], offload: Offload | None) -> None:
        self.plan, self.key, self.seed, self.offload = plan, key, seed, offload
        self.expected = plan.layouts.get(key)
        self.planned = plan.allocation(self.expected)
        self.sizes: list[int] = []
        self.bits: list[int] = []
        self.model_tensors: int | None = None  #: how many are the model's, once its forward is over

    def model_done(self) -> None:
        """What is saved from now on is the loss's."""
        self.model_tensors = len(self.sizes)

    def learn(self) -> None:
        """The backward begins: note what this kind of input makes the model and its loss save."""
        self.plan.layouts[self.key] = SavedSizes(
            tuple(self.sizes[: self.model_tensors]), tuple(self.sizes[self.model_tensors :])
        )

    def average_bits(self) -> float:
        return sum(b * d for b, d in zip(self.bits, self.sizes, strict=True)) / max(sum(self.sizes), 1)

    def encode(self, tensor: Tensor, order: MemoryOrder, values: Tensor) -> Code | None:
        index, size = len(self.sizes), values.numel()
        bits = self._bits(index, size)
        self.sizes.append(size)
        self.bits.append(bits)
        if bits == EXACT:
            return None
        code = self.plan.codec.encode(values.reshape(-1), bits, seed_of(*self.seed, index))
        return code if self.offload is None else self.offload(code)

    def _bits(self, index: int, size: int) -> int:
        if self.model_tensors is not None:
            return self.plan.loss_bits(size, sum(self.sizes[: self.model_tensors]))
        if self.planned is None or self.expected is None:
            return self.plan.uniform
        # another list of tensors than this input made before: its bits are not this tensor's
        as_expected = index < len(self.planned) and self.expected.model[index] == size
        return self.planned[index] if as_expected else self.plan.uniform


@dataclass
class Dual:
    """Two codes of one tensor, made with two seeds; the backward reads one of them."""

    codes: tuple[Code, Code]
    second: bool = False

    @property
    def nbytes(self) -> int:
        return sum(code.nbytes for code in self.codes)

    def unpack(self, dtype: torch.dtype) -> Tensor:
        return self.codes[self.second].unpack(dtype)


class ReplayedForward:
    """A forward run again: every tensor in the uniform width (algorithm 1 takes any scheme), with two seeds."""

    def __init__(self, plan: BitPlan, seed: tuple[int, int]) -> None:
        self.codec, self.width, self.seed = plan.codec, plan.uniform, seed
        self.duals: list[Dual] = []
        self.sizes: list[int] = []

    def encode(self, tensor: Tensor, order: MemoryOrder, values: Tensor) -> Code:
        self.sizes.append(values.numel())
        index, flat = len(self.sizes), values.reshape(-1)
        first, second = (
            self.codec.encode(flat, self.width, seed_of(*self.seed, "replay", index, which)) for which in (0, 1)
        )
        self.duals.append(Dual((first, second)))
        return self.duals[-1]


class RecomputedForward:
    """What a checkpoint recomputes in the backward: not measured, in the uniform width."""

    def __init__(self, plan: BitPlan, seed: tuple[int, int], segment: int) -> None:
        self.codec, self.width, self.seed, self.segment = plan.codec, plan.uniform, seed, segment
        self.count = 0

    def encode(self, tensor: Tensor, order: MemoryOrder, values: Tensor) -> Code:
        self.count += 1
        return self.codec.encode(values.reshape(-1), self.width, seed_of(*self.seed, self.segment, self.count))
