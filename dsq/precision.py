"""[q0, q1, q2, q3]: the precision of a layer, schedules of it, and widths that were seen to damage training."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from dsq.formats import NARROWEST, WIDEST
from dsq.operands import ACCEPTED, MIN_WEIGHT_BITS, Operands, level_texts, parse_level

ACCEPTED_LEVELS = "precisions that never decrease, as in [4,3,3,8] [8,4,4,8]"


@dataclass(frozen=True, slots=True)
class Precision:
    """Bits at the four points of a linear layer where DSQ quantizes (DSQ, section 3, figure 2), or its six operands.

    A width above 16 leaves values in floating point, but for bfp. ``text`` has a level that names formats, in the
    grammar of dsq/operands.py, or a recipe; the widths are then those of x, of the stash, and of dy in dx and in dw.
    Raises ValueError where a width is not a whole number in 2..32.
    """

    q0: int  #: the forward GEMM: x and w
    q1: int  #: the stash: x and w as the backward reads them
    q2: int  #: the gradient dy entering the GEMM for dx
    q3: int  #: the gradient dy entering the GEMM for dw, and dx leaving the layer
    text: str = ""  #: as the level was written, if it is not four widths

    def __post_init__(self) -> None:
        if not all(isinstance(width, int) and NARROWEST <= width <= WIDEST for width in self):
            raise ValueError(f"precision must be {ACCEPTED}, got {self}")

    def __iter__(self) -> Iterator[int]:
        return iter((self.q0, self.q1, self.q2, self.q3))

    def __str__(self) -> str:
        return self.text or "[" + ",".join(map(str, self)) + "]"

    @property
    def operands(self) -> Operands:
        """Return how each operand is quantized; widths stand for formats of the config's family."""
        return self.operands_with(MIN_WEIGHT_BITS)

    def operands_with(self, min_weight_bits: int) -> Operands:
        """Return ``operands`` under another ``DSQConfig.min_weight_bits``."""
        return parse_level(str(self), min_weight_bits).operands

    def as_json(self) -> list[int] | str:
        """Return the widths, or the text of a level that names formats: as checkpoints and ledgers have it."""
        return self.text or list(self)

    @staticmethod
    def parse(text: str) -> "Precision":
        """Read ``[16,4,4,16]``, brackets optional, commas or spaces; a level of named formats; a recipe's or a format's
        name. Raises ValueError for anything else.
        """
        if not isinstance(text, str):
            raise ValueError(f"precision must be {ACCEPTED}, got {text!r}")
        level = parse_level(text)
        x, _, dy_for_dx, _, dy_for_dw, stash, _ = level.operands
        return Precision(x.bits, stash.bits, dy_for_dx.bits, dy_for_dw.bits, level.text)


#: the levels that simulate where none are given: fewer bits take as long here and lose more. At q2 = 4 the gradient of
#: peaked logits loses what the layers before it learn from (docs/evidence.md: gat-cora)
DEFAULT_LEVELS = (Precision(8, 4, 8, 8),)
#: the default of DSQConfig. A DynamicPrecision decides it at its first training forward; until then, and in
#: ``dsq.convert``, it stands for DEFAULT_LEVELS
AUTO = Precision(8, 4, 8, 8, text="auto")
#: the other decision: the stash alone, whose products are as the trainer runs them
SAVING_LEVELS = (Precision.parse("[-,4,-,-]"),)
#: one level of a schedule, as a user may give it
Level = Precision | str | Sequence[int]


def parse_levels(levels: Level | Iterable[Level]) -> tuple[Precision, ...]:
    """Return the schedule that ``levels`` asks for: at least one level, and no width is less than in the level before.

    Flags, configs and ``dsq-cost`` read levels with this function. It takes a text, as ``"[4,3,3,8] [8,4,4,8]"``
    (spaces, commas or semicolons between; one level needs no brackets), a Precision, four widths, or a list of these.
    Raises ValueError for anything else, for no level, and for a width that decreases.
    """
    if levels in (AUTO.text, [AUTO.text], (AUTO,)):  # alone: a schedule's levels are decided
        return (AUTO,)
    schedule = tuple(_read_levels(levels))
    if not schedule:
        raise ValueError(f"levels must be {ACCEPTED_LEVELS}, got none")
    for before, after in pairwise(schedule):
        if any(b.bits > a.bits for b, a in zip(before.operands[:-1], after.operands[:-1], strict=True)):  # dx: a result
            raise ValueError(f"levels must be {ACCEPTED_LEVELS}, got {before} before {after}")
    return schedule


def levels_text(levels: Iterable[Precision]) -> str:
    """Return the text of a schedule, which ``parse_levels`` reads back."""
    return " ".join(map(str, levels))


def _read_levels(levels: Any) -> Iterator[Precision]:
    if isinstance(levels, Precision):
        yield levels
    elif isinstance(levels, str):
        yield from map(Precision.parse, level_texts(levels))
    elif not isinstance(levels, Iterable):
        raise ValueError(f"levels must be {ACCEPTED_LEVELS}, got {levels!r}")
    elif len(entries := list(levels)) == 4 and all(isinstance(width, int) for width in entries):
        yield Precision(*entries)
    else:
        for level in entries:
            yield from _read_levels(level)


RiseAt = float | str | Iterable[float]


def parse_rise_at(rise_at: RiseAt, levels: int) -> tuple[float, ...]:
    """Return ``rise_at`` as a tuple: no numbers, or one for each of ``levels`` but the first.

    The numbers rise, and are updates, or all of them fractions of the run. A text has spaces or commas between them, as
    "0.3 0.8". Raises ValueError for anything else.
    """
    moments = re.split(r"[\s,]+", rise_at.strip()) if isinstance(rise_at, str) else rise_at
    numbers = tuple(map(_moment, moments if isinstance(moments, Iterable) else (moments,)))
    if numbers and len(numbers) != levels - 1:
        text = f"rise_at must have a number for each level but the first, {levels - 1} of {levels} levels here"
        raise ValueError(f"{text}, got {len(numbers)}")
    if any(before >= after for before, after in pairwise(numbers)) or len({number < 1 for number in numbers}) > 1:
        raise ValueError(f"rise_at must rise, in updates or in fractions of the run, got {numbers}")
    return numbers


def _moment(value: Any) -> float:
    """Return ``value`` as a number. 1.0 is refused: it may stand for the first update or for the end of the run."""
    if isinstance(value, str) and re.fullmatch(r"\d+|\d*\.\d+", value):
        value = float(value) if "." in value else int(value)
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, float) and 0 < value < 1:
        return value
    raise ValueError(f"rise_at must be whole numbers of updates or fractions between 0 and 1, got {value!r}")


#: fp32's BLEU on Multi30k, German to English, 900 updates: the mean of three seeds (analysis/results/evidence.csv)
BLEU = 28.9
#: what of it was lost, to fp32 of the same seeds, with q0, q1 and q2 of so many bits, by format; and with 4 bits
#: rounded stochastically
LOST: dict[str, dict[int, float]] = {
    "snvint": {4: 0.7, 3: 1.9, 2: 11.9},
    "bfp": {4: 0.9, 3: 3.8, 2: 22.8},
    "fixed": {8: 0.1, 4: 23.8},
}
STOCHASTIC = {"snvint": 1.1, "bfp": 3.5}
#: q0, q1 and q2 under which more than a BLEU was lost, there or in analysis/results/multi30k.csv
_ENOUGH = {"snvint": (4, 3, 3), "bfp": (4, 3, 3), "fixed": (8, 8, 8)}
#: the paper's own finding, of fixed point alone
_FIXED_Q3 = 16


def damage(levels: Iterable[Precision], format: str, rounding: str) -> Iterator[str]:
    """Yield a line for each way in which ``levels`` in ``format``, rounded so, may damage training."""
    levels, least_bits = list(levels), _ENOUGH.get(format, ())
    if low := [level for level in levels if any(a < b for a, b in zip(level, least_bits, strict=False))]:
        lost = ", ".join(f"{bits} bits {lost}" for bits, lost in LOST[format].items())
        needed = "{}, {} and {} bits at q0, q1 and q2".format(*least_bits)
        yield f"{levels_text(low)} may damage training, which needed {needed}: of {BLEU} BLEU {format} lost with {lost}"
    if low := [level for level in levels if format == "fixed" and level.q3 < _FIXED_Q3]:
        yield f"{levels_text(low)}: under {_FIXED_Q3} bits of fixed for q3 training can fail (the paper's Appendix C)"
    if low := [level for level in levels if rounding == "stochastic" and format in STOCHASTIC and level.q0 <= 4]:
        lost = f"{STOCHASTIC[format]} of {BLEU} BLEU, to nearest {LOST[format][4]}"
        yield f"{levels_text(low)}: rounding='stochastic' may damage training: 4 bits of {format} lost {lost}"
