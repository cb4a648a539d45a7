"""Every number format states its bits, its grid and what it stores; and how a tensor lies in memory. No
tensors, no torch: the cost model has them too.

Block formats of floating or whole elements are data: a ``GridFormat`` of three numbers, a block and a scale rule, and a
line of ``NAMED``. A family of formats by width (bfp, snvint, fixed) is a dataclass with ``@register``, and its codec in
kernels/reference/formats.py.
"""

import re
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from math import frexp, isfinite, prod
from typing import Any, ClassVar, Literal, TypeVar, get_args

from dsq.arguments import choice, did_you_mean, whole_number

#: widest code that packs; a wider format leaves the value in floating point
MAX_PACKED_BITS = 16
#: narrowest and widest format
NARROWEST = 2
WIDEST = 32
#: values to a block of a block format, unless told
BLOCK_SIZE = 16
#: width of a scale as kernels store it
SCALE_BITS = 8
#: the format of a DSQConfig, a layer and every flag, unless told: of those measured the one that loses least at 2 to 4
#: bits, at the same bytes (docs/formats.md)
DEFAULT = "snvint"


@dataclass(frozen=True, slots=True)
class Layout:
    """A contiguous tensor as the kernels see it: ``outer`` x ``rows`` x ``columns`` values and the axis of its blocks.

    Blocks run along the columns where the block axis is the last one (then ``outer`` is 1), else along the rows.
    Codes lie in the tensor's order: each of the outer * rows rows is one little-endian bitstream of two's-complement
    codes, padded to a byte. Nothing is stored for the values that a short last block lacks.
    """

    outer: int
    rows: int
    columns: int
    along_rows: bool

    @staticmethod
    def of(shape: tuple[int, ...], dim: int) -> "Layout":
        """Return the layout of a tensor of ``shape`` with blocks along ``dim`` (negative counts from the end)."""
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

    def block_shape(self, block_size: int) -> tuple[int, ...]:
        """Return the blocks of ``block_size`` values, in the tensor's order; (1,) where one holds the whole tensor
        (0)."""
        if block_size == 0:
            return (1,)
        if self.along_rows:
            return (self.outer, -(-self.rows // block_size), self.columns)
        return (self.outer * self.rows, -(-self.columns // block_size))


@dataclass(frozen=True, slots=True)
class Format:
    """A number format: ``bits`` a code, and a scale shared by the values of a block.

    Raises ValueError for bits out of range, as subclasses do for fields of their own.
    """

    #: what configs, flags and dsq-cost call it
    name: ClassVar[str]
    #: bytes stored once a tensor besides codes and scales
    tensor_bytes: ClassVar[int] = 0
    #: widest code at which it gains anything on BFP: ``at`` takes BFP for wider ones
    useful_to: ClassVar[int] = WIDEST

    bits: int  #: width of a code, sign included: 2..16 packs, 17..32 leaves the value as it is

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", whole_number("bits", self.bits, NARROWEST, WIDEST))

    @property
    def block_size(self) -> int:
        """Return how many values along the block axis share a scale; 0: one scale serves the tensor."""
        return 0

    @property
    def packs(self) -> bool:
        """Return whether values become codes; else they stay in floating point."""
        return self.bits <= MAX_PACKED_BITS

    @property
    def quantizes(self) -> bool:
        """Return whether values are rounded: to codes, or to a grid finer than any code that packs."""
        return self.packs

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

    def unit_significand(self, floats: bool) -> int:
        """Return the bits of an element's magnitude as a unit of ``floats``, or of integers, multiplies it; scales that
        are no powers of two stay outside of the product."""
        return self.significand_bits

    @property
    def unit_name(self) -> str:
        """Return what hardware files call the units that multiply it."""
        return self.name

    @property
    def exact_in_bfloat16(self) -> bool:
        """Return whether bfloat16, whose significand has 8 bits, holds every value (subnormal ones aside)."""
        return self.packs and self.significand_bits <= 8

    def scale_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the shape of the uint8 tensor of scales: one a block in the tensor's order, and then the tensor's."""
        blocks = layout.block_shape(self.block_size)
        return (prod(blocks) + self.tensor_bytes,) if self.tensor_bytes else blocks

    def nbytes(self, layout: Layout) -> int:
        """Return the bytes of a tensor of this layout: packed, or in float32 if the format is wider than any code."""
        codes = prod(layout.code_shape(self.bits if self.bits <= MAX_PACKED_BITS else WIDEST))
        return codes + prod(self.scale_shape(layout)) if self.packs else codes

    def at(self, bits: int) -> "Format":
        """Return the format that takes its place at another width: the same, or BFP of its blocks if it is as good."""
        bfp: Any = FORMATS["bfp"]
        return replace(self, bits=bits) if bits <= self.useful_to else bfp(bits, self.block_size)

    def __str__(self) -> str:
        """Return the text that ``parse_format`` reads back."""
        return f"{self.name}:" + ",".join(
            f"{field.name}={getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) is not None
        )


@dataclass(frozen=True, slots=True)
class BlockFormat(Format):
    """A format whose scales serve ``block_size`` values each, along one axis."""

    block_size: int = BLOCK_SIZE  #: values that share a scale

    def __post_init__(self) -> None:
        Format.__post_init__(self)
        object.__setattr__(self, "block_size", whole_number("block_size", self.block_size, 1, (1 << 31) - 1))


#: the formats a tensor can be quantized to, by name
FORMATS: dict[str, type[Format]] = {}
F = TypeVar("F", bound=type[Format])


def register(format_class: F) -> F:
    """Enter a format under its name."""
    assert format_class.name not in FORMATS, f"format {format_class.name} registered twice"
    FORMATS[format_class.name] = format_class
    return format_class


def options(name: str) -> dict[str, Any]:
    """Return the fields of the format besides ``bits``, with their defaults. Raises ValueError for an unknown name."""
    return {field.name: field.default for field in fields(format_class(name)) if field.name != "bits"}


def format_class(name: str) -> type[Format]:
    """Return the format called ``name``. Raises ValueError for an unknown one."""
    return FORMATS[choice("format", name, FORMATS)]


def named(name: str, bits: int, **values: Any) -> Format:
    """Return the format called ``name`` at ``bits``, with ``values`` of its options; BFP where that is as good.

    Raises ValueError for an unknown name, an option that the format has not, or a value out of range.
    """
    for option in values:
        if option not in options(name):
            having = " or ".join(repr(other) for other in FORMATS if option in options(other))
            raise ValueError(f"{option} goes with format={having}, got format={name!r}")
    fmt = format_class(name)(bits, **values)
    if bits > MAX_PACKED_BITS and not isinstance(fmt, BFP):  # of the families BFP alone has so fine a grid
        return Identity(bits)
    return fmt.at(bits)


@lru_cache(maxsize=1024)  # a registered operator has its format as text
def parse_format(text: str) -> Format:
    """Return the format that ``text`` names: a name of ``NAMED``, perhaps with a scale rule (``mxfp4:even``), a family
    and a width (``bfp4``), or what ``str`` gives (``bfp:bits=4,block_size=16``).

    Raises ValueError for anything else, with the nearest name.
    """
    name, _, suffix = text.partition(":")
    if name in NAMED and not suffix:
        return NAMED[name]
    if name in NAMED and isinstance(fmt := NAMED[name], GridFormat):
        return replace(fmt, rule=suffix)
    if by_width := re.fullmatch(rf"({'|'.join(FORMATS)})(\d+)", text):
        return format_class(by_width[1])(int(by_width[2]))
    if integers := re.fullmatch(r"int(\d+)_(?:(row|tensor)|(\d+)x(\d+))", text):
        block = {"row": (1, 0), "tensor": (0, 0)}.get(integers[2]) or (int(integers[3]), int(integers[4]))
        return GridFormat(integer_grid(int(integers[1])), block, "fp32")
    if name == "grid":
        return _parse_grid_format(suffix)
    if identity := re.fullmatch(r"float:bits=(\d+)", text):
        return Identity(int(identity[1]))
    if name not in FORMATS or not suffix:
        hint = did_you_mean(text, format_names())
        raise ValueError(f"format must be one of {', '.join(format_names())}, got {text!r}{hint}")
    try:
        arguments = {key: int(value) for key, value in (item.split("=") for item in suffix.split(","))}
        return format_class(name)(**arguments)
    except TypeError:
        names = ", ".join(option.name for option in fields(format_class(name)))
        raise ValueError(f"format {name} takes {names}, as in bfp:bits=4,block_size=16, got {text!r}") from None
    except ValueError as error:
        raise ValueError(f"format must be written as in bfp:bits=4,block_size=16, got {text!r} ({error})") from None


def format_names() -> list[str]:
    """Return what ``parse_format`` takes, a family by an example: bfp4."""
    return [*NAMED, *(f"{family}4" for family in FORMATS)]


# ---- block formats: BFP is the format of DSQ; SignedNVInt wastes no code


@register
@dataclass(frozen=True, slots=True)
class BFP(BlockFormat):
    """Block floating point: along one axis, ``block_size`` values share one exponent (DSQ, section 4; MX's INT grid).

    With E = max floor(log2|x|) over the block, the step is ``2**(E - (bits - 2))`` and the largest code
    ``2**(bits - 1) - 1``. Raises ValueError for bits or block_size out of range.
    """

    name: ClassVar[str] = "bfp"

    @property
    def quantizes(self) -> bool:
        """Return True: codes of 17 to 32 bits round too, though values are stored in float32 then, whose 24 bits hold
        those of a block's largest binade exactly, and round the smaller ones no further than the grid."""
        return True


@register
@dataclass(frozen=True, slots=True)
class SignedNVInt(BlockFormat):
    """NVINT with a signed scale: two's complement codes, an E4M3 scale a block, and an exponent a tensor.

    BFP never uses the code -2^(bits-1): at 2 bits a quarter of the codes. Here the value of largest magnitude in a
    block, x_M, takes the negative side, which is one code longer, by the sign of the block's step; and as in NVFP4 and
    NVINT4 the scale has a mantissa (3 bits), so that x_M lies on the grid's end:

        E    = floor(log2 max|x|) over the tensor, clipped to -90..120
        step = -sign(x_M) e4m3(|x_M| / 2^(bits-1) / T) T,   T = 2^(E - bits - 6)

    A scale is a byte, the sign and E4M3; one byte more a tensor holds E + 127. A value has bits + 3 significant bits at
    most, so that bfloat16 holds it up to 5 bits. One NaN or infinity makes the whole tensor NaN. Of two values of the
    same largest magnitude the positive one counts. Raises ValueError for bits or block_size out of range.
    """

    name: ClassVar[str] = "snvint"
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


# ---- formats without blocks: fixed point, the paper's baseline, and no quantization

#: the exponent of a value's step is stored in 8 bits, biased by this, so it spans -BIAS .. 254 - BIAS
BIAS = 127


@register
@dataclass(frozen=True, slots=True)
class FixedPoint(Format):
    """Fixed point: one binary point for the whole tensor.

    ``fraction_bits`` None places it by the tensor's largest value (dynamic: the grid of BFP with one block); a number
    leaves it there for good (static: step ``2**-fraction_bits``, values beyond the range are clipped). The paper does
    not say which it takes; six bits that stay come nearest to its rows (docs/results.md). Raises ValueError for bits or
    fraction bits out of range.
    """

    name: ClassVar[str] = "fixed"

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

    bits: int = field(default=WIDEST, repr=False)  #: 16 or 32, as of the types float16 and float32

    @property
    def packs(self) -> bool:
        return False

    @property
    def significand_bits(self) -> int:
        return 24 if self.bits > 16 else min(self.bits, 11)

    @property
    def multiplier_bits(self) -> int:
        """Return the width of the significand, hidden bit included, of bf16 and of fp32."""
        return 24 if self.bits > 16 else 8


# ---- formats as data: a grid of elements, and a scale for each block


@dataclass(frozen=True, slots=True)
class Grid:
    """The magnitudes k 2^(e - digits), k whole and below 2^(digits + 1), e from ``lowest`` on, up to ``largest``.

    A minifloat has ``digits`` bits of mantissa and the least exponent ``lowest``. An integer is one all of whose values
    are subnormal. Raises ValueError for fields out of range, or a ``largest`` that does not lie on the grid.
    """

    digits: int
    lowest: int
    largest: float

    def __post_init__(self) -> None:
        whole_number("digits", self.digits, 1, MAX_PACKED_BITS - 1)
        whole_number("lowest", self.lowest, -100, 100)
        if not (isfinite(self.largest) and 0 < self.largest <= 2.0**100) or self._index(self.largest) % 1:
            raise ValueError(f"largest must be a value of the grid, up to 2^100, got {self.largest!r}")
        object.__setattr__(self, "largest", float(self.largest))
        whole_number("bits of an element", self.bits, NARROWEST, MAX_PACKED_BITS)

    def _index(self, magnitude: float) -> float:
        """Return the place of a magnitude among all of the grid, from 0 on."""
        exponent = max(frexp(magnitude)[1] - 1, self.lowest)
        return magnitude * 2.0 ** (self.digits - exponent) + (exponent - self.lowest) * 2.0**self.digits

    @property
    def largest_index(self) -> int:
        return int(self._index(self.largest))

    @property
    def top(self) -> int:
        """Return floor(log2 largest)."""
        return frexp(self.largest)[1] - 1

    @property
    def bits(self) -> int:
        """Return the width of an element: a sign, and the place of its magnitude."""
        return 1 + self.largest_index.bit_length()

    @property
    def significand_bits(self) -> int:
        return self.digits + (self.largest >= 2.0**self.lowest)

    @property
    def unit(self) -> int:
        """Return the power of two that is the finest step."""
        return self.lowest - self.digits

    @property
    def integer_bits(self) -> int:
        """Return the width of the integers, sign included, that hold every element in units of the finest step."""
        return 1 + int(self.largest * 2.0**-self.unit).bit_length()


def integer_grid(bits: int) -> Grid:
    """Return the symmetric integers of ``bits`` bits as MX scales them: k / 2^(bits - 2), |k| < 2^(bits - 1)."""
    whole_number("bits", bits, NARROWEST, MAX_PACKED_BITS)
    return Grid(bits - 1, 1, 2 - 2.0 ** (2 - bits))


Scale = Literal["e8m0", "e4m3", "fp32"]
#: how a scale follows from a = amax of its block; ``top`` is floor(log2 largest). The first is the default
#:
#: e8m0  floor   2^(floor(log2 a) - top)                       (OCP MX 1.0, section 6.3)
#:       ceil    2^(ceil(log2 a) - top)
#:       even    as floor, of a rounded to the grid's digits first
#:       rceil   2^ceil(log2(a / largest))                     (NVIDIA)
#: e4m3  te      e4m3(a S / largest), S = 448 largest / amax of the tensor in float32; a small one may be 0
#:       clamped the same by torchao's arithmetic (0.18), 2^-6 at least
#: fp32  amax    a / largest
SCALE_RULES: dict[Scale, tuple[str, ...]] = {
    "e8m0": ("floor", "ceil", "even", "rceil"),
    "e4m3": ("te", "clamped"),
    "fp32": ("amax",),
}
_SCALE_BYTES = {"e8m0": 1, "e4m3": 1, "fp32": 4}


@dataclass(frozen=True, slots=True)
class GridFormat(Format):
    """Elements of a grid, and one scale for each block of them.

    A NaN or an infinity makes its block NaN; with a scale for the tensor besides (e4m3), the whole tensor. The last
    block may be short. Raises ValueError for fields out of range.
    """

    name: ClassVar[str] = "grid"

    bits: int = field(init=False, repr=False)
    grid: Grid
    block: tuple[int, int] = (1, 32)  #: rows, and columns, which run along the contraction; 0: all of them
    scale: Scale = "e8m0"
    rule: str = ""  #: of SCALE_RULES; "": the first
    pair: int = 0  #: neighbors that share a bit that halves their step (MX9, MX6, MX4); 0: none
    prescale: float = 1.0  #: factor of values before rounding, which is undone after it: with 3/4 nothing clips

    def __post_init__(self) -> None:
        object.__setattr__(self, "bits", self.grid.bits)
        rules = SCALE_RULES[choice("scale", self.scale, get_args(Scale))]  # type: ignore[index]
        object.__setattr__(self, "rule", choice("rule", self.rule or rules[0], rules))
        if not isinstance(self.block, tuple) or len(self.block) != 2:
            raise ValueError(f"block must be (rows, columns), as (1, 32), got {self.block!r}")
        rows, columns = (whole_number("block", size, 0, (1 << 31) - 1) for size in self.block)
        object.__setattr__(self, "block", (rows, columns))
        whole_number("pair", self.pair, 0, 64)
        if self.pair and (columns % self.pair or rows != 1 or self.scale != "e8m0" or not columns):
            raise ValueError(f"pair must divide a block of one row and an e8m0 scale, got {self.pair} of {self.block}")
        if not 2.0**-10 <= self.prescale <= 1:
            raise ValueError(f"prescale must be in 2^-10..1, got {self.prescale!r}")

    @property
    def block_size(self) -> int:
        return self.block[1]

    @property
    def packs(self) -> bool:
        return True

    @property
    def significand_bits(self) -> int:
        scale = {"e8m0": 0, "e4m3": 4 + 24, "fp32": 24}[self.scale]  # that of a tensor is a float32 too
        return self.grid.significand_bits + scale + (24 if self.prescale != 1 else 0)

    @property
    def multiplier_bits(self) -> int:
        return self.grid.significand_bits + 1

    def unit_significand(self, floats: bool) -> int:
        return self.grid.significand_bits if floats else self.grid.integer_bits - 1

    @property
    def unit_name(self) -> str:
        """Return the name of these elements, scales and runs along the contraction: how scales come about does not
        matter to a unit, nor do the rows of a block."""
        return str(replace(self, block=(1, self.block[1]), rule="", prescale=1.0))

    def matrix(self, layout: Layout) -> tuple[int, int, int]:
        """Return the tensor as (outer, rows, columns) whose columns run along the contraction."""
        if self.block == (0, 0):
            return 1, 1, layout.outer * layout.rows * layout.columns
        if layout.along_rows:
            return layout.outer, layout.columns, layout.rows
        return 1, layout.outer * layout.rows, layout.columns

    def tile(self, layout: Layout) -> tuple[int, int]:
        """Return rows and columns of a block, neither larger than the tensor (but of pairs, which stay whole)."""
        _, rows, columns = self.matrix(layout)
        if self.pair:
            return self.block
        return max(min(self.block[0] or rows, rows), 1), max(min(self.block[1] or columns, columns), 1)

    def blocks(self, layout: Layout) -> tuple[int, int, int]:
        """Return how many blocks there are of the outer axis, rows and columns."""
        (outer, rows, columns), (height, width) = self.matrix(layout), self.tile(layout)
        return outer, -(-rows // height), -(-columns // width)

    def scale_shape(self, layout: Layout) -> tuple[int, ...]:
        """Return the bytes of all scales: of the blocks, then a bit for each pair, then the float32 of the tensor."""
        blocks = self.blocks(layout)
        pairs = prod(blocks) * self.block_size // self.pair if self.pair else 0
        return (prod(blocks) * _SCALE_BYTES[self.scale] + -(-pairs // 8) + 4 * (self.scale == "e4m3"),)

    def at(self, bits: int) -> Format:
        """Return this format if it is as wide, else BFP of that width in blocks of as many values."""
        return self if bits == self.bits else BFP(bits, self.block_size or BLOCK_SIZE)

    def __str__(self) -> str:
        """Return its name, or the text of all its fields; ``parse_format`` reads either."""
        named_so = _NAME_OF.get(self)
        return named_so or (
            f"grid:{self.grid.digits},{self.grid.lowest},{self.grid.largest!r},{self.block[0]}x{self.block[1]},"
            f"{self.scale},{self.rule},{self.pair},{self.prescale!r}"
        )


def _parse_grid_format(text: str) -> GridFormat:
    """Return the format of what ``GridFormat.__str__`` writes after "grid:". Raises ValueError for anything else."""
    try:
        digits, lowest, largest, block, scale, rule, pair, prescale = text.split(",")
        rows, columns = map(int, block.split("x"))
        grid = Grid(int(digits), int(lowest), float(largest))
        return GridFormat(grid, (rows, columns), scale, rule, int(pair), float(prescale))  # type: ignore[arg-type]
    except (ValueError, TypeError) as error:
        accepted = "grid:1,0,6.0,1x32,e8m0,floor,0,1.0"
        raise ValueError(f"format must be written as in {accepted}, got 'grid:{text}' ({error})") from None


E2M1_GRID, E4M3_GRID, E5M2_GRID = Grid(1, 0, 6.0), Grid(3, -6, 448.0), Grid(2, -14, 57344.0)
E2M3_GRID, E3M2_GRID = Grid(3, 0, 7.5), Grid(2, -2, 28.0)

#: formats by the name that the field gives them
NAMED: dict[str, Format] = {}
_NAME_OF: dict[Format, str] = {}  # the first name of each


def register_format(name: str, fmt: Format) -> None:
    """Let levels, configs, flags and ``quantize`` take ``fmt`` by ``name``: lower-case letters, digits and ``_``.

    Raises ValueError where the name has another form, or stands for something else; TypeError if ``fmt`` is no format.
    """
    if not isinstance(fmt, Format):
        raise TypeError(f"fmt must be a format, as GridFormat(Grid(1, 0, 6.0)), got {fmt!r}")
    try:
        name_exists = parse_format(name) != fmt
    except ValueError:
        name_exists = name in (*FORMATS, "grid", "float", "bf16", "fp16", "fp32", "auto", "all")
    if name_exists or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ValueError(f"name must be of lower-case letters, digits and _, and new, got {name!r}")
    NAMED[name] = fmt
    _NAME_OF.setdefault(fmt, name)
    parse_format.cache_clear()


for _name, _format in {
    "mxfp8_e4m3": GridFormat(E4M3_GRID),
    "mxfp8_e5m2": GridFormat(E5M2_GRID),
    "mxfp6_e2m3": GridFormat(E2M3_GRID),
    "mxfp6_e3m2": GridFormat(E3M2_GRID),
    "mxfp4": GridFormat(E2M1_GRID),
    "mxint8": BFP(8, 32),
    "mxfp8": GridFormat(E4M3_GRID),
    "mxfp6": GridFormat(E2M3_GRID),
    "mxfp4_aws": GridFormat(E2M1_GRID, prescale=0.75),
    "nvfp4": GridFormat(E2M1_GRID, (1, 16), "e4m3"),
    "nvfp4_2d": GridFormat(E2M1_GRID, (16, 16), "e4m3"),
    "nvfp4_clamped": GridFormat(E2M1_GRID, (1, 16), "e4m3", "clamped"),
    "fp8_tensor": GridFormat(E4M3_GRID, (0, 0), "fp32"),
    "fp8_row": GridFormat(E4M3_GRID, (1, 0), "fp32"),
    "fp8_1x128": GridFormat(E4M3_GRID, (1, 128), "fp32"),
    "fp8_128x128": GridFormat(E4M3_GRID, (128, 128), "fp32"),
    "fp8_e5m2_tensor": GridFormat(E5M2_GRID, (0, 0), "fp32"),
    "fp8_e5m2_row": GridFormat(E5M2_GRID, (1, 0), "fp32"),
    "int8_32x32": GridFormat(integer_grid(8), (32, 32), "fp32"),
    "int8_row": GridFormat(integer_grid(8), (1, 0), "fp32"),
    "int8_tensor": GridFormat(integer_grid(8), (0, 0), "fp32"),
    "mx9": GridFormat(integer_grid(8), (1, 16), pair=2),
    "mx6": GridFormat(integer_grid(5), (1, 16), pair=2),
    "mx4": GridFormat(integer_grid(3), (1, 16), pair=2),
    "msfp16": BFP(8),
    "msfp12": BFP(4),
}.items():
    register_format(_name, _format)
