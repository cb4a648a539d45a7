"""What was seen to damage training: below which widths, by format. The runs are in docs/results.md."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsq.precision import Precision, levels_text


@dataclass(frozen=True, slots=True)
class Borne:
    """The least widths that training bore in a format, and what it lost below them."""

    least: Precision
    lost: str


#: in runs of a small translation model, of which fp32 reached 88 BLEU; what was not tried below is 2
BORNE = {
    "snvint": Borne(Precision(3, 2, 2, 2), "2 bits throughout lost 19 of 88 BLEU, for the first half of the run 9"),
    "sbfp": Borne(Precision(3, 2, 2, 2), "2 bits throughout lost 26 of 88 BLEU"),
    "bfp": Borne(Precision(4, 3, 3, 2), "3 bits throughout lost 7 of 88 BLEU, 2 bits 65; snvint loses less"),
    "fixed": Borne(Precision(8, 8, 8, 2), "4 bits throughout lost 30 of 88 BLEU, in the stash alone 28 of 36"),
}
#: the paper's own finding, of fixed point alone
_FIXED_Q3 = 16


def damage(levels: Iterable[Precision], format: str) -> Iterator[str]:
    """A line for each way in which ``levels`` in ``format`` may damage training."""
    levels = list(levels)
    borne = BORNE.get(format)
    low = [level for level in levels if borne and any(a < b for a, b in zip(level, borne.least, strict=True))]
    if borne and low:
        bits = f"{borne.least.q0}, {borne.least.q1} and {borne.least.q2} bits of {format} at q0, q1 and q2"
        yield f"{levels_text(low)} is below {bits}, the least that training bore: {borne.lost}"
    low = [level for level in levels if format == "fixed" and level.q3 < _FIXED_Q3]
    if low:
        why = "training can fail, the paper's Appendix C finds"
        yield f"{levels_text(low)}: under {_FIXED_Q3} bits of fixed for q3 {why}"
