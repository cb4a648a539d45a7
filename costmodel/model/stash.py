"""What the policies of dsq.stash keep of a tensor that autograd saves."""

from dataclasses import dataclass

from costmodel.model.ledger import Stored
from costmodel.model.operations import Gemm, Operation

#: widths of kept tensors that no policy packs
EXACT_WIDTHS = ("mask", "ids")
#: values up to which a tensor stays exact
FEW = 256
#: values that are packed at a time
CHUNK = 2**20
#: scale and index of a sampled row
ROW_BYTES = 4 + 8


@dataclass(frozen=True)
class Stash:
    """A policy, or policies together."""

    name: str
    bits: float = 32  #: of a kept float, scales included; 32: as it is
    loss_bits: float = 32  #: and of what the loss keeps
    masks: bool = False  #: a relu keeps one bit a value for itself, and so do zeros that are added to scores
    packing: int = 0  #: fp32 copies of a chunk that packing holds besides the tensor
    codes: int = 0  #: bits of its codes where dsq.pack, which `calibrate` times, is all it does
    ratio: float = 1  #: part of the rows of a linear layer's input that are kept

    def keeps(self, op: Operation, stored: Stored, size: float, values: float) -> float:
        """Bytes kept of one such tensor of so many bytes and values."""
        if stored.shape in ("rows", "M") or stored.width in EXACT_WIDTHS or values <= FEW:
            return size
        if isinstance(op, Gemm):
            linear = op.weight and op.quantised and op.weights == 1 and not op.transposed  # experts are none
            if self.ratio < 1 and linear and stored.name == "x":
                sampled = round(self.ratio * op.M) * op.K
                return sampled * min(size / values, self.bits / 8) + ROW_BYTES * self.ratio * op.M
            return min(size, values * self.bits / 8)
        bits = self.loss_bits if op.kind.startswith("loss") else self.bits
        if self.masks and op.kind in ("relu", "fused zero bias"):
            bits = 1
        return min(size, values * bits / 8)

    def packing_bytes(self, values: float) -> float:
        """What packing so many values holds besides the tensor."""
        return self.packing * 4 * min(values, CHUNK)


#: name -> the policies that a plan compares
POLICIES = {
    stash.name: stash
    for stash in (
        Stash("selective", masks=True),  # a relu before a frozen layer keeps bits; else what PyTorch keeps
        Stash("bfp 4", 4 + 8 / 16, masks=True, codes=4),  # a box of 16 values shares 8 bits
        Stash("bfp 2", 2 + 8 / 16, masks=True, codes=2),
        Stash("mesa", 8, masks=False),
        Stash("gact 4", 4 + 64 / 256, 4 + 64 / 256, masks=True, packing=2),  # 256 values share two floats
        Stash("wtacrs 0.3", ratio=0.3),
        Stash("wtacrs 0.3 + bfp 4", 4 + 8 / 16, masks=True, ratio=0.3),
    )
}
