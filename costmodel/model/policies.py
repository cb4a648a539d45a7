"""Policies of dsq.stash as the cost model knows them: bits of what they keep. Which tensors are coded, and as what, the
ledger says; the bits themselves stand in dsq/kept.py."""

from dataclasses import dataclass

from costmodel.model.ledger import Stored
from costmodel.model.operations import Gemm, Operation
from dsq.formats import WIDEST
from dsq.kept import FEW, GACT_GROUP, MESA_BITS, MORE, What

#: scale and index of a sampled row
ROW_BYTES = 4 + 8


@dataclass(frozen=True)
class Stash:
    """A policy, or policies together. The ledger says which tensors are coded, and as what (Stored.coded)."""

    name: str
    bits: int = 0  #: bits of a code; 0: nothing is coded
    scales: float = 0  #: bits of scales beside a code
    more: bool = False  #: some tensors have more bits (dsq.kept.MORE)
    masks: bool = True  #: relu and dropout keep a bit a value
    ratio: float = 1  #: part of the rows of a linear layer's input that are kept

    def keeps(self, op: Operation, stored: Stored, size: float, values: float) -> float:
        """Bytes that the policy keeps of one tensor, which has ``size`` bytes and so many values."""
        coded = stored.copied if stored.copied and size < values * WIDEST / 8 else stored.coded
        if coded == "bit":
            return values / 8 if self.masks else size
        if isinstance(op, Gemm) and stored.name == "x" and op.weight:
            if self.samples(op):
                sampled = round(self.ratio * op.M) * op.K
                return sampled * min(size / values, self.code_bits("linear") / 8) + ROW_BYTES * self.ratio * op.M
            if op.weights > 1 and not op.x_values:  # experts' grouped product has no row
                return size
            values = min(values, op.M * op.K)  # of a part of x that is read
        if not self.bits or coded == "" or values <= FEW:
            return size
        return 0.0 if coded == "made again" else min(size, values * self.code_bits(coded) / 8)

    def samples(self, op: Gemm) -> bool:
        """Whether the policy samples rows of the input: of an nn.Linear, which no expert, convolution or Conv1D is."""
        convolution = 0 < op.x_values <= op.M * op.K
        linear = op.weight and op.weights == 1 and not op.transposed and not convolution and (op.quantised or op.tied)
        return linear and self.ratio < 1

    @property
    def packs(self) -> int:
        """Bits of the codes if the policy only packs by dsq.pack, which `calibrate` times; else 0."""
        return self.bits if self.more and self.ratio == 1 else 0

    def code_bits(self, what: What) -> float:
        """Bits of a value that is coded as ``what``, scales included; of a float if nothing is coded."""
        return self.bits + self.more * MORE.get(what, 0) + self.scales if self.bits else WIDEST


_BOX = 8 / 16  #: a box of 16 values shares 8 bits
#: name -> the policies that a plan compares
POLICIES = {
    stash.name: stash
    for stash in (
        Stash("selective"),
        Stash("bfp 4", 4, _BOX, more=True),
        Stash("bfp 2", 2, _BOX, more=True),
        Stash("mesa", MESA_BITS),
        Stash("gact 4", 4, 64 / GACT_GROUP),
        Stash("wtacrs 0.3", masks=False, ratio=0.3),
        Stash("wtacrs 0.3 + bfp 4", 4, _BOX, more=True, ratio=0.3),
    )
}
