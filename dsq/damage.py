"""What was seen to damage training: fewer bits than it needed, by format, and gradients that are moved too far.

The runs are in docs/ablations.md and docs/coverage.md.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dsq.precision import Precision, levels_text


@dataclass(frozen=True, slots=True)
class Needed:
    """The widths that training needed in a format, and what it lost below them."""

    widths: Precision
    lost: str


#: in runs of a small translation model, of which fp32 reached 88 BLEU; what was not tried below is 2
NEEDED = {
    "snvint": Needed(Precision(3, 2, 2, 2), "2 bits throughout lost 21 of 88 BLEU, for the first half of the run 8"),
    "sbfp": Needed(Precision(4, 3, 3, 2), "3 bits throughout lost 4 of 88 BLEU, 2 bits 25"),
    "bfp": Needed(Precision(4, 3, 3, 2), "3 bits throughout lost 7 of 88 BLEU, 2 bits 62; snvint loses less"),
    "fixed": Needed(Precision(8, 8, 8, 2), "4 bits throughout lost 34 of 88 BLEU, at q1 and q2 alone 30 of 37"),
}
#: of the same runs at 4 bits throughout, by format: BLEU that rounding stochastically lost, and rounding to nearest
STOCHASTIC = {"bfp": (4.4, 1.0), "sbfp": (3.4, 1.0)}
#: the paper's own finding, of fixed point alone
_FIXED_Q3 = 16


def damage(levels: Iterable[Precision], format: str, rounding: str) -> Iterator[str]:
    """A line for each way in which ``levels`` in ``format``, rounded so, may damage training."""
    levels = list(levels)
    needed = NEEDED.get(format)
    low = [level for level in levels if needed and any(a < b for a, b in zip(level, needed.widths, strict=True))]
    if needed and low:
        q0, q1, q2, _ = needed.widths
        bits = f"{q0}, {q1} and {q2} bits of {format} at q0, q1 and q2"
        yield f"{levels_text(low)} may damage training, which needed {bits}: {needed.lost}"
    low = [level for level in levels if format == "fixed" and level.q3 < _FIXED_Q3]
    if low:
        why = "training can fail, the paper's Appendix C finds"
        yield f"{levels_text(low)}: under {_FIXED_Q3} bits of fixed for q3 {why}"
    low = [level for level in levels if rounding == "stochastic" and format in STOCHASTIC and level.q0 <= 4]
    if low:
        lost, nearest = STOCHASTIC[format]
        why = f"4 bits of {format} throughout lost {lost} of 88 BLEU, to nearest {nearest}"
        yield f"{levels_text(low)}: rounding='stochastic' may damage training: {why}"


@dataclass(frozen=True, slots=True)
class Limits:
    """The furthest that a gradient may be moved (dsq/gradient_check.py has the equations)."""

    error: float
    of_stash: float
    cosine: float  #: of a parameter
    ratio: float  #: of a parameter's norms; the reciprocal is a limit too


# From a transformer on Multi30k (docs/coverage.md), where bf16 autocast has error .01 to .04 and cosines from .998:
#: [8,4,4,8] (error to .29, of the stash .05, cosine .80) trains as bf16 autocast does; stashes at .075 cost BLEU
FINE = Limits(error=0.45, of_stash=0.06, cosine=0.6, ratio=3.0)
#: [4,3,3,8] (error to .60, cosine .45) trains and loses a little; [2,2,2,2] (2.3, 0, ratio 8) does not
USABLE = Limits(error=0.8, of_stash=0.8, cosine=0.3, ratio=10.0)
#: share of the gradient under which a parameter is not judged: rounding noise, as in the bias of attention's keys
FLOOR = 1e-4
