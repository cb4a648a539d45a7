"""Numbers of bits: precisions, formats, and how many bytes a tensor takes in them.

Every function takes Python ints or numpy integer arrays for bit widths alike, so one formula serves one query and a
sweep.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

#: an int, or a numpy array of ints (one entry a configuration of a sweep)
Bits = Any

#: above this width dsq keeps the fp32 value itself (4 bytes)
WIDEST_PACKED = 16
KINDS = ("bfp", "fixed", "float")


@dataclass(frozen=True)
class Format:
    """How the bits of a quantised tensor are laid out.

    kind "bfp": boxes of `box` values share one `exponent_bits` exponent; "fixed": one exponent byte a tensor;
    "float": a plain container, nothing shared.
    """

    kind: str = "bfp"
    box: int = 16  #: values that share an exponent
    exponent_bits: int = 8  #: width of the shared exponent
    box_axis: str = "contraction"  #: "contraction": along the axis the consuming GEMM sums over; "last": the last axis

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"format must be one of {', '.join(KINDS)}, not {self.kind!r}")
        if not 1 <= self.box <= 65536:
            raise ValueError(f"box must be from 1 to 65536 values, not {self.box}")
        if not 1 <= self.exponent_bits <= 16:
            raise ValueError(f"exponent bits must be from 1 to 16, not {self.exponent_bits}")
        if self.box_axis not in ("contraction", "last"):
            raise ValueError(f"box axis must be 'contraction' or 'last', not {self.box_axis!r}")


@dataclass(frozen=True)
class Precision:
    """[q0, q1, q2, q3] (paper, figure 2): forward operands, stash, gradient into the dx GEMM, gradient written and
    into dw."""

    q0: Bits
    q1: Bits
    q2: Bits
    q3: Bits

    @classmethod
    def of(cls, widths: tuple[int, ...] | list[int]) -> Precision:
        """Checked construction from four ints in 2..32. Raises ValueError."""
        ok = len(widths) == 4 and all(isinstance(q, int) and not isinstance(q, bool) for q in widths)
        if not ok or not all(2 <= q <= 32 for q in widths):
            raise ValueError(f"a precision is four widths from 2 to 32 bits such as [16,4,4,16], not {widths!r}")
        return cls(*widths)

    @property
    def widths(self) -> tuple[Bits, Bits, Bits, Bits]:
        return (self.q0, self.q1, self.q2, self.q3)

    def __str__(self) -> str:
        return f"[{self.q0},{self.q1},{self.q2},{self.q3}]"


def parse_precision(text: str) -> tuple[str | None, Precision]:
    """'[16,4,4,16]', '16,4,4,16' or 'fixed:[16,16,16,16]' -> (format kind or None, Precision). Raises ValueError."""
    match = re.fullmatch(r"\s*(?:([A-Za-z]+)\s*:)?\s*\[?\s*((?:\d+\s*,\s*){3}\d+)\s*\]?\s*", text)
    if not match:
        raise ValueError(
            f"precision {text!r} is malformed: write [q0,q1,q2,q3] or format:[q0,q1,q2,q3], e.g. bfp:[16,4,4,16]"
        )
    kind = match[1].lower() if match[1] else None
    if kind is not None and kind not in KINDS:
        raise ValueError(f"precision {text!r}: format must be one of {', '.join(KINDS)}, not {kind!r}")
    return kind, Precision.of([int(width) for width in match[2].split(",")])


def ceil_div(a: Bits, b: Bits) -> Bits:
    return -(-a // b)


def container_bits(precision: Precision) -> Bits:
    """Width `a` of tensors no quantiser touches (residual stream, softmax, norms): 16 if all of q0..q3 fit in 16
    bits, else 32."""
    widest = np.maximum(np.maximum(precision.q0, precision.q1), np.maximum(precision.q2, precision.q3))
    return np.where(widest > WIDEST_PACKED, 32, 16)


def packed_bytes(outer: int, rows: int, columns: int, bits: Bits, fmt: Format, boxes: str) -> Bits:
    """Bytes of an (outer, rows, columns) tensor as dsq packs it, `boxes` = the axis ("rows"/"columns") boxes run along.

    codes, outer * rows * ceil(columns * bits / 8), for each row is one bitstream padded to a byte; plus exponent_bytes.
    Above 16 bits: fp32, 4 bytes a value.
    """
    codes = outer * rows * ceil_div(columns * bits, 8)
    kept = np.where(np.asarray(bits) > WIDEST_PACKED, 4 * outer * rows * columns, codes)
    return kept + exponent_bytes(outer, rows, columns, bits, fmt, boxes)


def exponent_bytes(outer: int, rows: int, columns: int, bits: Bits, fmt: Format, boxes: str) -> Bits:
    """What box storage adds to the codes.

    bfp: boxes along columns outer * rows * ceil(columns / box) exponents, along rows outer * ceil(rows / box) *
    columns; fixed: one byte a tensor; float, and anything above 16 bits: nothing.
    """
    shared = 0
    if fmt.kind == "bfp":
        along_columns = boxes == "columns" or fmt.box_axis == "last"
        count = rows * ceil_div(columns, fmt.box) if along_columns else ceil_div(rows, fmt.box) * columns
        shared = ceil_div(outer * count * fmt.exponent_bits, 8)
    elif fmt.kind == "fixed":
        shared = 1
    return np.where(np.asarray(bits) > WIDEST_PACKED, 0, shared)
