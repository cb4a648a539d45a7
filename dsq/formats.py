"""Every number format states its bits, its grid, what it stores and what it costs; and how a tensor lies in memory. No
tensors, no torch: the cost model has them too.

To add a format, write a dataclass with ``@register``, and its codec in kernels/reference/formats.py.
"""

from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, ClassVar, TypeVar

from dsq.arguments import choice, whole_number

#: widest code that packs; a wider format keeps the value in floating point
MAX_PACKED_BITS = 16
#: narrowest and widest format
NARROWEST = 2
WIDEST = 32
#: values to a box of a block format, unless told
BOX = 16
#: width of a scale as kernels store it
SCALE_BITS = 8
#: the format of a DSQConfig, a layer and every flag, unless told: of those measured the one that loses least at 2 to 4
#: bits, at the same bytes (docs/formats.md)
DEFAULT = "snvint"


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
        """Return the layout of a tensor of ``shape`` with boxes along ``dim`` (negative counts from the end)."""
        rank = max(len(shape), 1)
        if not -rank <= dim < rank:
            raise ValueError(f"dim must be in [{-rank}, {rank - 1}] for a tensor of shape {tuple(shape)}, got {dim}")
        dim %= rank
        if dim == rank - 1:
            columns = shape[-1] if shape else 1
            return Layout(1, prod(shape[:-1]), columns, along_rows=False)
        return Layout(prod(shape[:dim]), shape[dim], prod(shape[dim + 1 :]), along_rows=True)

    def code_shape(self, bits: int) -> tuple[int, int]:
        """Return the shape of the bitstreams, in bytes."""
        return (self.outer * self.rows, -(-self.columns * bits // 8))

    def box_shape(self, box: int) -> tuple[int, ...]:
        """Return the boxes of ``box`` values, in the tensor's order; (1,) where one holds the whole tensor (0)."""
        if box == 0:
            return (1,)
        if self.along_rows:
            return (self.outer, -(-self.rows // box), self.columns)
        return (self.outer * self.rows, -(-self.columns // box))


@dataclass(frozen=True, slots=True)
class Law:
    """The cost of one multiply-accumulate: ``K * (m1 * m2)**p``, in fixed-point 32 x 32 multiply-accumulates."""

    K: float
    p: float
    source: str

    def cost(self, m1: Any, m2: Any) -> Any:
        """Return the cost at operand widths ``m1`` and ``m2``: ints, or numpy arrays of them."""
        return self.K * (1.0 * m1 * m2) ** self.p


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: ``bits`` a code, and a scale shared by the values of a box.

    Raises ValueError for bits out of range, as subclasses do for fields of their own.
    """

    #: what configs, flags and dsq-cost call it
    name: ClassVar[str]
    #: what its multiplications cost
    law: ClassVar[Law]
    #: bytes stored once a tensor besides codes and scales
    tensor_bytes: ClassVar[int] = 0
    #: widest code at which it gains anything on BFP: ``at`` takes BFP for wider ones
    useful_to: ClassVar[int] = WIDEST

    bits: int  #: width of a code, sign included: 2..16 packs, 17..32 keeps the value as it is

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits, NARROWEST, WIDEST))

    @property
    def box(self) -> int:
        """Return how many values along the box axis that share a scale; 0: one scale serves the tensor."""
        return 0

    @property
    def packs(self) -> bool:
        """Return whether values become codes; else they stay in floating point."""
        return self.bits <= MAX_PACKED_BITS

    @property
    def largest_code(self) -> int:
        return int((1 << (self.bits - 1)) - 1)

    @property
    def smallest_code(self) -> int:
        return -self.largest_code

    @property
    def significand_bits(self) -> int:
        """Return the bits that hold the magnitude of any value on the grid, its power of two aside."""
        return self.bits - 1

    @property
    def multiplier_bits(self) -> int:
        """Return the width of an operand as the multiplier of the cost law sees it: a code, sign included."""
        return self.bits

    @property
    def exact_in_bfloat16(self) -> bool:
        """Return whether bfloat16, whose significand has 8 bits, holds every value (subnormal ones aside)."""
        return self.packs and self.significand_bits <= 8

    def scale_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of the uint8 tensor of scales: one a box in the tensor's order, and then the tensor's."""
        boxes = layout.box_shape(self.box)
        return (prod(boxes) + self.tensor_bytes,) if self.tensor_bytes else boxes

    def nbytes(self, layout: Layout) -> int:
        """Return the bytes of a tensor of this layout: packed, or in float32 if the format is wider than any code."""
        codes = prod(layout.code_shape(self.bits if self.bits <= MAX_PACKED_BITS else WIDEST))
        return codes + prod(self.scale_shape(layout)) if self.packs else codes

    def at(self, bits: int) -> "Format":
        """Return the format that takes its place at another width: the same, or BFP of its boxes if it is as good."""
        bfp: Any = FORMATS["bfp"]
        return replace(self, bits=bits) if bits <= self.useful_to else bfp(bits, self.box)

    def __str__(self) -> str:
        """Return the text that ``parse_format`` reads back."""
        return f"{self.name}:" + ",".join(
            f"{it.name}={getattr(self, it.name)}" for it in fields(self) if getattr(self, it.name) is not None
        )


@dataclass(frozen=True, slots=True)
class BoxFormat(Format):
    """A format whose scales serve ``box`` values each, along one axis."""

    box: int = BOX  #: values that share a scale

    def __post_init__(self) -> None:
        Format.__post_init__(self)
        object.__setattr__(self, "box", whole_number("box", self.box, 1, (1 << 31) - 1))


#: the formats a tensor can be quantised to, by name
FORMATS: dict[str, type[Format]] = {}
F = TypeVar("F", bound=type[Format])


def register(format_class: F) -> F:
    """Enter a format under its name."""
    assert format_class.name not in FORMATS, f"format {format_class.name} registered twice"
    FORMATS[format_class.name] = format_class
    return format_class


def options(name: str) -> dict[str, Any]:
    """Return the fields of the format besides ``bits``, with their defaults. Raises ValueError for an unknown name."""
    return {it.name: it.default for it in fields(format_class(name)) if it.name != "bits"}


def format_class(name: str) -> type[Format]:
    """Return the format called ``name``. Raises ValueError for an unknown one."""
    return FORMATS[choice("format", name, FORMATS)]


def named(name: str, bits: int, **given: Any) -> Format:
    """Return the format called ``name`` at ``bits``, with the options ``given``; BFP where that is as good.

    Raises ValueError for an unknown name, an option that the format has not, or a value out of range.
    """
    for option in given:
        if option not in options(name):
            having = " or ".join(repr(other) for other in FORMATS if option in options(other))
            raise ValueError(f"{option} goes with format={having}, got format={name!r}")
    return format_class(name)(bits, **given).at(bits)


@lru_cache(maxsize=1024)  # a registered operator has its format as text
def parse_format(text: str) -> Format:
    """Return the format written ``bfp:bits=4,box=16``, as ``str`` gives it. Raises ValueError for anything else."""
    name, _, rest = text.partition(":")
    try:
        arguments = {key: int(value) for key, value in (item.split("=") for item in rest.split(","))}
        return format_class(name)(**arguments)
    except (ValueError, TypeError) as error:
        raise ValueError(f"format must be written as in bfp:bits=4,box=16, got {text!r} ({error})") from None


# ---- block formats: BFP is the format of DSQ; SignedNVInt wastes no code


@register
@dataclass(frozen=True, slots=True)
class BFP(BoxFormat):
    """Block floating point: along one axis, ``box`` values share one exponent (DSQ, section 4; MX's INT grid).

    With E = max floor(log2|x|) over the box, the step is ``2**(E - (bits - 2))`` and the largest code
    ``2**(bits - 1) - 1``. Raises ValueError for bits or box out of range.
    """

    name: ClassVar[str] = "bfp"
    #: from the two all-equal BFP rows of the paper's table 1
    law: ClassVar[Law] = Law(
        0.56 / 32 ** (2 * 0.82),
        0.82,
        "table 1's BFP [32,32,32,32] 0.56x and [16,16,16,16] 0.18x; p = ln(0.56/0.18)/ln 4 to two digits",
    )


@register
@dataclass(frozen=True, slots=True)
class SignedNVInt(BoxFormat):
    """NVINT with a signed scale: two's complement codes, an E4M3 scale a box, and an exponent a tensor.

    BFP never uses the code -2^(bits-1): at 2 bits a quarter of the codes. Here the value of largest magnitude in a box,
    x_M, takes the negative side, which is one code longer, by the sign of the box's step; and as in NVFP4 and NVINT4
    the scale has a mantissa (3 bits), so that x_M lies on the grid's end:

        E    = floor(log2 max|x|) over the tensor, clipped to -90..120
        step = -sign(x_M) e4m3(|x_M| / 2^(bits-1) / T) T,   T = 2^(E - bits - 6)

    A scale is a byte, the sign and E4M3; one byte more a tensor holds E + 127. A value has bits + 3 significant bits at
    most, so that bfloat16 holds it up to 5 bits. One NaN or infinity makes the whole tensor NaN. Of two values of the
    same largest magnitude the positive one counts. Raises ValueError for bits or box out of range.
    """

    name: ClassVar[str] = "snvint"
    law: ClassVar[Law] = BFP.law
    tensor_bytes: ClassVar[int] = 1
    #: the tensor's exponent is clipped to these, so that no step is subnormal, nor the inverse of one
    exponents: ClassVar[tuple[int, int]] = (-90, 120)
    useful_to: ClassVar[int] = 6  # above, the clipping that its rounded scale causes outweighs what it gains

    @property
    def smallest_code(self) -> int:
        return -self.largest_code - 1

    @property
    def significand_bits(self) -> int:
        return self.bits + 3  # E4M3 has 4, and a code of the largest magnitude is a power of two


# ---- formats without boxes: fixed point, the paper's baseline, and no quantisation

#: the exponent of a value's step is stored in 8 bits, biased by this, so it spans -BIAS .. 254 - BIAS
BIAS = 127


@register
@dataclass(frozen=True, slots=True)
class FixedPoint(Format):
    """Fixed point: one binary point for the whole tensor.

    ``fraction_bits`` None places it by the tensor's largest value (dynamic: the grid of BFP with one box); a number
    leaves it there for good (static: step ``2**-fraction_bits``, values beyond the range are clipped). The paper does
    not say which it takes; six bits that stay come nearest to its rows (docs/results.md). Raises ValueError for bits or
    fraction bits out of range.
    """

    name: ClassVar[str] = "fixed"
    law: ClassVar[Law] = Law(
        1 / 32**2,
        1.0,
        "array multiplier: one cell for each pair of operand bits; table 1's 16x16 row, 0.25 = (16*16)/(32*32)",
    )

    fraction_bits: int | None = None  #: the static binary point; None: placed by the largest value

    def __post_init__(self) -> None:
        Format.__post_init__(self)
        if self.fraction_bits is not None:  # the exponent has to be one that is stored
            low, high = self.bits - 2 - BIAS, self.bits - 2 + BIAS
            object.__setattr__(self, "fraction_bits", whole_number("fraction_bits", self.fraction_bits, low, high))

    @property
    def static_exponent(self) -> int | None:
        """Return the exponent E of the largest values, where it does not follow them."""
        return None if self.fraction_bits is None else self.bits - 2 - self.fraction_bits


@dataclass(frozen=True, slots=True)
class Identity(Format):
    """Values as they are, in a floating type of ``bits`` bits."""

    name: ClassVar[str] = "float"
    law: ClassVar[Law] = FixedPoint.law  #: of the significands

    bits: int = field(default=WIDEST, repr=False)  #: 16 or 32, as of the types float16 and float32

    @property
    def packs(self) -> bool:
        return False

    @property
    def significand_bits(self) -> int:
        return 24 if self.bits > 16 else min(self.bits, 11)

    @property
    def multiplier_bits(self) -> int:
        return self.significand_bits
