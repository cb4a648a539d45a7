"""The operands of a linear layer's three products, and how a level writes them.

    y = x w        dx = dy w        dw = dy x        each operand rounded along its contraction

The long form names each operand, the products between bars, and the format of dx as a third word where it has one:
``[nvfp4 nvfp4_2d | nvfp4~ nvfp4_2d bf16 | nvfp4~@r16 nvfp4@r16]``. The short form has four places, as
``[nvfp4/nvfp4_2d, mxfp8, nvfp4~, bf16]``: the forward (x/w), the stash (x/w as the backward reads them), dy in dx, and
dy in dw (that/dx).

An operand is bits of the config's family, or the name of a format, and after it ``~`` where rounding is stochastic,
``@h32`` or ``@r32`` for a Hadamard transform of 32 values along the contraction with fixed or random signs, ``^`` where
it is quantized from what the forward rounded. ``-``, bf16 and fp32 leave it as it is.

    schedule = level level ...
    level    = [long form] | [short form] | long form | short form | name
    name     = a recipe's, or an operand of a format by name: it stands for all six

Spaces and commas separate words; semicolons may separate levels. ``parse_level`` reads one level. ``level_texts`` cuts
a schedule: each bracket and each name is a level, but four formats, and words of which one is a number or a bar, are
one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from typing import Literal, NamedTuple

from dsq import recipes
from dsq.arguments import whole_number
from dsq.formats import NARROWEST, WIDEST, Format, GridFormat, format_names, parse_format

#: least bits of w in the backward. The weight is not stashed, so these bits cost no memory, and all tokens share its
#: rounding error, so no batch averages it out. With 5 bits instead of 4 a GPT's gradient error falls by 9 %, by 18 %
#: under stash="all"; with 8 by 13 and 27 %. AVX2 multiplies codes of 13 bits together: 8 of dy leave 5, and 8 of w cost
#: a tenth of a step there. In eleven translations under stash="all" 8 gained nothing (-.007 nats +- .018, 2026-11-28).
MIN_WEIGHT_BITS = 5
#: bits that an operand counts for which stays in floating point
UNQUANTIZED_BITS = 16
LARGEST_HADAMARD = 4096
#: what an operand that stays in floating point may be called -> the bits that dsq-cost gives it; 0: the trainer's
FLOATS = {"-": 0, "bf16": 16, "fp16": 16, "fp32": 32}
_WORD = re.compile(
    r"(?P<format>-|\d+|[^\W\d][^~@^/\s]*)(?P<stochastic>~?)(?:@(?P<signs>[hr])(?P<size>\d*))?(?P<forward>\^?)"
)


@dataclass(frozen=True, slots=True)
class OperandSpec:
    """How one operand is quantized, as a level writes it."""

    format: str = "-"  #: bits of the config's family, what ``parse_format`` reads, or "-"
    stochastic: bool = False
    hadamard: int = 0  #: values of a transform along the contraction; 0: none
    random_signs: bool = False  #: of the transform
    of_forward: bool = False  #: quantized from what the forward rounded
    float_name: str = field(default="-", compare=False)  #: of an operand that stays as it is: see FLOATS

    @staticmethod
    @lru_cache(maxsize=256)
    def parse(word: str) -> "OperandSpec":
        """Return the operand that ``word`` describes. Raises ValueError for another form or an unknown format."""
        match = _WORD.fullmatch(word)
        if match is None:
            raise ValueError(f"an operand must be bits or a format, as in 8, mxfp4, nvfp4~@r16 or -, got {word!r}")
        name = "-" if match["format"] in FLOATS else match["format"]
        fmt = None if name == "-" or name.isdecimal() else parse_format(name)
        if name.isdecimal():
            whole_number("bits of an operand", int(name), NARROWEST, WIDEST)
        if name == "-" and word not in FLOATS:
            raise ValueError(f"an operand that stays as it is takes no ~, @ or ^, got {word!r}")
        size = 0
        if match["signs"]:
            size = int(match["size"] or (0 if fmt is None else fmt.block_size))
            if size < 2 or size & (size - 1) or size > LARGEST_HADAMARD:
                raise ValueError(f"a Hadamard transform takes 2, 4, 8 .. {LARGEST_HADAMARD} values, got {word!r}")
        float_name = word if word in FLOATS else "-"
        return OperandSpec(
            name, bool(match["stochastic"]), size, match["signs"] == "r", bool(match["forward"]), float_name
        )

    @property
    def float_bits(self) -> int:
        """Return the bits that dsq-cost gives an operand that stays as it is; 0: the trainer's."""
        return FLOATS[self.float_name]

    @property
    def bits(self) -> int:
        """Return the bits of an element; of an operand that stays as it is 16."""
        if self.format == "-":
            return UNQUANTIZED_BITS
        return int(self.format) if self.format.isdecimal() else parse_format(self.format).bits

    @property
    def resolved(self) -> Format | None:
        """Return the format, of an operand whose bits ``with_family`` has replaced; None: it stays as it is."""
        return None if self.format == "-" else parse_format(self.format)

    def with_family(self, family: Callable[[int], Format]) -> "OperandSpec":
        """Return the operand with its bits, if it has some, as the format of ``family``."""
        if not self.format.isdecimal():
            return self
        fmt = family(int(self.format))
        if not fmt.quantizes:
            return OperandSpec()
        short = f"{fmt.name}{fmt.bits}"
        return replace(self, format=short if parse_format(short) == fmt else str(fmt))

    def untransformed(self) -> "OperandSpec":
        """Return the operand quantized as it comes, along the same axis."""
        return replace(self, hadamard=0, random_signs=False, of_forward=False)

    def __str__(self) -> str:
        transform = f"@{'r' if self.random_signs else 'h'}{self.hadamard}" if self.hadamard else ""
        return f"{self.format}{'~' * self.stochastic}{transform}{'^' * self.of_forward}"


class Operands(NamedTuple):
    """The six operands, and dx as it leaves the layer."""

    x: OperandSpec
    w: OperandSpec
    dy_for_dx: OperandSpec
    w_for_dx: OperandSpec
    dy_for_dw: OperandSpec
    x_for_dw: OperandSpec  #: the stash
    dx: OperandSpec

    def __str__(self) -> str:
        dx = "" if self.dx.format == "-" else f" {self.dx}"
        x, w, dy_for_dx, w_for_dx, dy_for_dw, x_for_dw, _ = map(str, self)
        return f"[{x} {w} | {dy_for_dx} {w_for_dx}{dx} | {dy_for_dw} {x_for_dw}]"

    def with_family(self, family: Callable[[int], Format]) -> "Operands":
        return Operands(*(operand.with_family(family) for operand in self))

    @property
    def mode(self) -> Literal["simulation", "saving"]:
        """Return "simulation" if a product has a quantized operand or result, but for the stash; else "saving"."""
        operands = self._replace(x_for_dw=OperandSpec())
        return "simulation" if any(operand.format != "-" for operand in operands) else "saving"

    @property
    def names_stash(self) -> bool:
        """Return whether dw reads x in the very format that the level names, and no values that other operations saved
        of x. Asked of levels that name formats: one of four widths never does."""
        return self.mode == "simulation" or isinstance(self.x_for_dw.resolved, GridFormat)


ACCEPTED = f"four whole numbers in {NARROWEST}..{WIDEST}, as in [16,4,4,16]"
_BY_NAME = 'formats by name are written as in mxfp8, [nvfp4/nvfp4_2d,mxfp8,nvfp4~,bf16] or "[- - | mxfp4 mxfp4 | 8 8]"'
_ALL = 'stash="all" packs all saved tensors, in dsq-cost: plan "[8,4,8,8] all"'
#: tokens: a level in brackets; a mark; or a word, in which a format's text has commas between its fields
_TOKEN = re.compile(r"\[[^][]*\]|[][|;]|grid:[^][|;,\s]+(?:,[^][|;,\s]+){7}|[^][|;,\s]+(?:,\w+=[^][|;,\s]+)*")
#: tokens that are no level
_NO_LEVELS = {"[", "]", "|", ";", "all"}


@dataclass(frozen=True, slots=True)
class ParsedLevel:
    """A level as ``parse_level`` reads it."""

    operands: Operands
    text: str  #: as it was written, with one space or comma between words; empty: four widths


@lru_cache(maxsize=256)
def parse_level(text: str, min_weight_bits: int = MIN_WEIGHT_BITS) -> ParsedLevel:
    """Return the level that a text writes, alone. Raises ValueError.

    ``min_weight_bits`` is the least width of w in dx where the level does not say how dx's product reads w.
    """
    words = _TOKEN.findall(text)
    has_brackets = len(words) == 1 and words[0][0] + words[0][-1] == "[]"
    words = _TOKEN.findall(words[0][1:-1]) if has_brackets else words
    products = [product.split() for product in " ".join(words).split("|")]
    if list(map(len, products)) in ([2, 2, 2], [2, 3, 2]):
        forward, (dy_for_dx, w_for_dx, *dx), gradient = products
        specs = [*forward, dy_for_dx, w_for_dx, *gradient, *(dx or ["-"])]
        level = ParsedLevel(Operands(*map(OperandSpec.parse, specs)), f"[{' '.join(words)}]")
    elif len(words) == len(products[0]) == 4:
        places = [[OperandSpec.parse(word) for word in place.split("/")] for place in words]
        is_widths = all(map(str.isdecimal, words))
        level = ParsedLevel(_of_places(places, min_weight_bits), "" if is_widths else f"[{','.join(words)}]")
    elif len(words) == 1 and not has_brackets and words[0] not in _NO_LEVELS and not words[0][0].isdecimal():
        level = replace(parse_level(_in_full(words[0])), text=words[0])
    else:
        raise ValueError(f"precision must be {ACCEPTED}, got {text!r}; {_ALL if 'all' in words else _BY_NAME}")
    _check_transforms(level.operands)
    return level


def level_texts(text: str) -> list[str]:
    """Return the texts of a schedule's levels, in order."""
    words = [word for word in _TOKEN.findall(text) if word != ";"]
    has_level = any(word[0] == "[" or word in recipes.names() for word in words)
    is_level = not has_level and (len(words) in (0, 4) or any(map(str.isdecimal, words)))
    return [text] if is_level or not _NO_LEVELS.isdisjoint(words) else words


def is_level_name(word: str) -> bool:
    """Return whether a word is the name of a recipe, or a format that stands for all operands."""
    try:
        return word in recipes.names() or not OperandSpec.parse(word).format.isdecimal()
    except ValueError:
        return False


def _in_full(name: str) -> str:
    """Return the long form of a level's name. Raises ValueError for one most like a recipe's, which it names."""
    names = recipes.names() + format_names()
    matches = [name] if is_level_name(name) else get_close_matches(name.lower(), names, 1, 0.5)
    if not {*matches}.isdisjoint(recipes.names()):
        return recipes.recipe(name).operands
    return f"[{name} {name} | {name} {name} | {name} {name}]"


def _of_places(places: list[list[OperandSpec]], min_weight_bits: int) -> Operands:
    forward, stash, (dy_for_dx, *surplus), gradient = places
    if surplus or max(map(len, places)) > 2:
        raise ValueError("a place has one operand, or two as in nvfp4/nvfp4_2d; the third, dy, is one alone")
    return Operands(
        x=forward[0],
        w=forward[-1],
        dy_for_dx=dy_for_dx,
        w_for_dx=stash[1] if len(stash) == 2 else _weight_for_dx(forward[-1], stash[0], dy_for_dx, min_weight_bits),
        dy_for_dw=gradient[0],
        x_for_dw=stash[0],
        dx=gradient[1] if len(gradient) == 2 else gradient[0].untransformed(),
    )


def _weight_for_dx(w: OperandSpec, stash: OperandSpec, dy: OperandSpec, min_bits: int) -> OperandSpec:
    """Return how dx's product reads w where the level does not say: as the stash, of bits in at least ``min_bits`` if
    the forward has as many; as it is, beside a gradient that stays as it is."""
    if "-" in (stash.format, dy.format):
        return OperandSpec(float_name=max(stash, dy, key=lambda spec: spec.float_bits).float_name)
    if not stash.format.isdecimal():
        return OperandSpec(stash.format, hadamard=dy.hadamard, random_signs=dy.random_signs)
    return OperandSpec(str(max(stash.bits, min(w.bits, min_bits))), stash.stochastic)


def _check_transforms(operands: Operands) -> None:
    """Raise ValueError where the operands of a product are not transformed alike: they would not meet."""
    for a, b in (operands[:2], operands[2:4], operands[4:6]):
        if (a.hadamard, a.random_signs) != (b.hadamard, b.random_signs):
            raise ValueError(f"the operands of a product must have one transform, got {a} and {b}")
    if any(spec.of_forward for spec in operands._replace(w_for_dx=OperandSpec(), x_for_dw=OperandSpec())):
        raise ValueError("^ is of the backward's x and w alone, which the forward rounds first")
    if operands.dx.hadamard:
        raise ValueError(f"dx leaves the layer as it is rounded, and takes no @, got {operands.dx}")
