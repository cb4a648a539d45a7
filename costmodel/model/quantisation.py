"""What is costed: a number format, the axis of its boxes, and the widths q0..q3, of one configuration or of many."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, reduce
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from dsq.arguments import choice
from dsq.formats import DEFAULT, MAX_PACKED_BITS, WIDEST, Format, Identity, Layout, format_class
from dsq.formats.layout import BoxAxis
from dsq.precision import Precision

#: an int, or a numpy array of ints (one entry a configuration of a sweep)
Bits = Any


@dataclass(frozen=True)
class PrecisionGrid:
    """The precisions of a sweep: an array for each of q0..q3, one entry a configuration."""

    q0: npt.NDArray[np.int64]
    q1: npt.NDArray[np.int64]
    q2: npt.NDArray[np.int64]
    q3: npt.NDArray[np.int64]

    def __iter__(self) -> Iterator[npt.NDArray[np.int64]]:
        return iter((self.q0, self.q1, self.q2, self.q3))

    def __len__(self) -> int:
        return len(self.q0)

    def __getitem__(self, row: int) -> Precision:
        return Precision(*(int(widths[row]) for widths in self))


@dataclass(frozen=True)
class Setup:
    """A quantisation that is costed. Raises ValueError for an unknown box axis."""

    format: Format  #: its own bits do not matter: the precision has them
    precision: Precision | PrecisionGrid
    box_axis: str = "contraction"  #: "contraction": the axis the consuming GEMM sums over; "last": the last axis
    container: int = 0  #: bits of what no quantiser touches; 0: as few as the precision allows
    autocast: bool = False  #: torch.autocast: parameters and the residual stream stay in fp32, products cast them

    def __post_init__(self) -> None:
        choice("box_axis", self.box_axis, get_args(BoxAxis))

    @cached_property
    def container_bits(self) -> Bits:
        """Width `a` of tensors no quantiser touches (residual stream, softmax, norms): 16 if q0..q3 fit, else 32,
        unless told."""
        if self.container:
            return self.container
        widest = reduce(np.maximum, self.precision)
        return by_width(widest, lambda m: MAX_PACKED_BITS if m <= MAX_PACKED_BITS else WIDEST)

    def layout(self, outer: int, rows: int, columns: int, boxes: str) -> Layout:
        """Of an (outer, rows, columns) tensor whose contraction axis is `boxes`: "rows" or "columns"."""
        return Layout(outer, rows, columns, along_rows=boxes == "rows" and self.box_axis == "contraction")

    def __str__(self) -> str:
        return f"{self.format.name} {self.precision}"


FP32 = Setup(Identity(WIDEST), Precision(32, 32, 32, 32))
BF16 = Setup(Identity(WIDEST), Precision(16, 16, 16, 16))
AUTOCAST = replace(BF16, autocast=True)
DSQ = format_class(DEFAULT)(WIDEST)  #: the default format


def by_width(bits: Bits, value: Callable[[int], float]) -> Any:
    """``value`` of each width. It is called once a distinct width, which is what makes sweeps fast."""
    if np.ndim(bits) == 0:
        return value(int(bits))
    widths = np.flatnonzero(np.bincount(bits))
    values = np.array([value(int(m)) for m in widths])
    table = np.zeros(widths[-1] + 1, values.dtype)
    table[widths] = values
    return table[bits]


@lru_cache(maxsize=1024)
def at_width(template: Format, bits: int) -> Format:
    return template.at(bits)


def nbytes(template: Format, bits: Bits, layout: Layout) -> Bits:
    """Bytes of a tensor of this layout in the format, codes and scales."""
    return by_width(bits, lambda m: at_width(template, m).nbytes(layout))


def scale_bytes(template: Format, bits: Bits, layout: Layout) -> Bits:
    """The part of ``nbytes`` that is no codes."""
    return by_width(bits, lambda m: at_width(template, m).scale_bytes(layout))


def multiplier_bits(template: Format, bits: Bits) -> Bits:
    """Bits a multiplier works on: all of a code, the significand of a float."""
    return by_width(bits, lambda m: at_width(template, m).multiplier_bits)
