"""Figures of the paper (Yang, Lo, Mullins and Zhao, Dynamic Stashing Quantization, 2023), for comparison and
residuals only.

Nothing that computes a cost reads this file; costs are relative to fixed-point 32, as the paper's are.
"""

from dataclasses import dataclass

from costmodel.model.methods import Setup
from dsq.formats import BFP, WIDEST, FixedPoint, Format
from dsq.precision import Precision


@dataclass(frozen=True)
class Row:
    table: int
    dataset: str
    workload: str  #: a name of named.WORKLOADS
    method: str
    format: Format
    precision: Precision | None  #: None: a DSQ run, averaged over its levels
    arithmetic: float
    dram: float
    contradicts: str = ""  #: why this figure cannot be right

    @property
    def setup(self) -> Setup:
        """The row's setup; DSQ's rows have none."""
        assert self.precision is not None
        return Setup(self.format, self.precision)


_FIXED, _BFP = FixedPoint(WIDEST), BFP(WIDEST)
_METHODS = (
    ("Fixed-point", _FIXED, Precision(32, 32, 32, 32)),
    ("Fixed-point", _FIXED, Precision(16, 16, 16, 16)),
    ("Block FP", _BFP, Precision(32, 32, 32, 32)),
    ("Block FP", _BFP, Precision(16, 16, 16, 16)),
    ("Stashing (Fixed)", _FIXED, Precision(16, 4, 4, 16)),
    ("Stashing (BFP)", _BFP, Precision(16, 4, 4, 16)),
    ("DSQ (BFP)", _BFP, None),
)


def _rows(
    table: int, dataset: str, workload: str, arithmetic: tuple[float, ...], dram: tuple[float, ...]
) -> tuple[Row, ...]:
    return tuple(
        Row(table, dataset, workload, method, template, precision, a, d)
        for (method, template, precision), a, d in zip(_METHODS, arithmetic, dram, strict=False)
    )


_IWSLT = ((1.00, 0.25, 0.56, 0.18, 0.13, 0.10, 0.012), (1.00, 0.50, 1.13, 0.63, 0.31, 0.45, 0.20))
_GLUE = ((1.00, 0.25, 0.56, 0.18, 0.13, 0.10, 0.043), (1.00, 0.50, 1.13, 0.63, 0.32, 0.45, 0.26))
_SLIP = "table 1 prints 0.45x for the same setup on the same layers"

#: tables 1 and 6
ROWS = (
    *_rows(1, "IWSLT17 DE-EN", "transformer_iwslt_de_en", *_IWSLT),
    *_rows(1, "GLUE MNLI", "roberta_base_mnli", *_GLUE),
    *_rows(1, "GLUE QNLI", "roberta_base_qnli", *_GLUE),
    *_rows(6, "WMT14 EN-DE", "transformer_wmt_en_de", (1.00, 0.25, 0.56, 0.18, 0.13), (1.00, 0.50, 1.13, 0.63, 0.31)),
    Row(6, "WMT14 EN-DE", "transformer_wmt_en_de", "Stashing (BFP)", _BFP, Precision(16, 4, 4, 16), 0.10, 0.20, _SLIP),
)

#: the levels of a DSQ run (appendix B)
DSQ_LEVELS = (Precision(2, 2, 2, 16), Precision(16, 4, 4, 16))

#: abstract: reductions of DSQ on IWSLT17 against fixed-point 16, which table 1 rounds (the introduction swaps the two)
HEADLINE_ARITHMETIC, HEADLINE_DRAM = 20.95, 2.55

#: table 7: OPT-1.3B, share of latency and bound
TABLE_7 = {"attention": (0.4793, "memory"), "fc": (0.3220, "compute"), "other": (0.1987, "memory")}
