"""How a packed tensor lies in memory."""

from dataclasses import dataclass
from math import prod
from typing import Literal

#: along which axis boxes run: the contraction axis of the GEMM that consumes the tensor, or the tensor's last axis
BoxAxis = Literal["contraction", "last"]


@dataclass(frozen=True, slots=True)
class Layout:
    """A contiguous tensor as the kernels see it: ``outer`` x ``rows`` x ``columns`` values and the axis of its boxes.

    Boxes run along the columns where the box axis is the last one (then ``outer`` is 1), else along the rows.
    Codes keep the tensor's own order: each of the outer * rows rows is one little-endian bitstream of two's-complement
    codes, padded to a byte. Nothing is stored for the values that a short last box lacks.
    """

    outer: int
    rows: int
    columns: int
    along_rows: bool

    @staticmethod
    def of(shape: tuple[int, ...], dim: int) -> "Layout":
        """The layout of a tensor of ``shape`` with boxes along ``dim`` (negative counts from the end)."""
        rank = max(len(shape), 1)
        if not -rank <= dim < rank:
            raise ValueError(f"dim must be in [{-rank}, {rank - 1}] for a tensor of shape {tuple(shape)}, got {dim}")
        dim %= rank
        if dim == rank - 1:
            columns = shape[-1] if shape else 1
            return Layout(1, prod(shape[:-1]), columns, along_rows=False)
        return Layout(prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]), along_rows=True)

    def code_shape(self, bits: int) -> tuple[int, int]:
        """Shape of the bitstreams, in bytes."""
        return (self.outer * self.rows, -(-self.columns * bits // 8))

    def code_bytes(self, bits: int) -> int:
        rows, row_bytes = self.code_shape(bits)
        return rows * row_bytes

    def box_shape(self, box: int) -> tuple[int, ...]:
        """The boxes of ``box`` values, in the tensor's order; (1,) where one holds the whole tensor (0)."""
        if box == 0:
            return (1,)
        if self.along_rows:
            return (self.outer, -(-self.rows // box), self.columns)
        return (self.outer * self.rows, -(-self.columns // box))

    def boxes(self, box: int) -> int:
        return prod(self.box_shape(box))
