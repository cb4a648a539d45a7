"""The grid of a block format: what a kernel needs to know to quantise and to pack."""

from dataclasses import dataclass

#: widest code that packs; wider formats keep the value as it is
MAX_BITS = 16
#: the exponent is stored in 8 bits, biased, so it spans -BIAS .. 254 - BIAS
BIAS = 127
#: stored exponent of a box that holds a NaN or an infinity: the whole box decodes to NaN
NAN_EXPONENT = 255


@dataclass(frozen=True, slots=True)
class Grid:
    """Values of a box with exponent E lie on ``code * 2**(E - (bits - 2))`` with ``|code| <= 2**(bits-1) - 1``."""

    bits: int  #: width of a code, sign included: 2..16
    box: int  #: values along the box axis that share an exponent; 0: one box holds the whole tensor
    exponent: int | None = None  #: with box 0, an exponent that does not follow the values (a static binary point)

    @property
    def max_code(self) -> int:
        return (1 << (self.bits - 1)) - 1


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
            return Layout(1, _product(shape[:-1]), columns, along_rows=False)
        return Layout(_product(shape[:dim]), shape[dim], _product(shape[dim + 1 :]), along_rows=True)

    def code_shape(self, bits: int) -> tuple[int, int]:
        return (self.outer * self.rows, -(-self.columns * bits // 8))

    def exponent_shape(self, box: int) -> tuple[int, ...]:
        if box == 0:
            return (1,)
        if self.along_rows:
            return (self.outer, -(-self.rows // box), self.columns)
        return (self.outer * self.rows, -(-self.columns // box))


def _product(sizes: tuple[int, ...]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
