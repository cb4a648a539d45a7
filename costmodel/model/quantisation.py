"""What is costed: a number format, the axis of its boxes, the widths q0..q3, and the width of all else."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, get_args

from dsq.arguments import choice
from dsq.formats import DEFAULT, MAX_PACKED_BITS, WIDEST, BoxAxis, Format, Identity, Layout, format_class
from dsq.precision import Precision


@dataclass(frozen=True)
class Setup:
    """A quantisation that is costed. Raises ValueError for an unknown box axis."""

    format: Format  #: its own bits do not matter: the precision has them
    precision: Precision
    box_axis: str = "contraction"  #: "contraction": the axis the consuming GEMM sums over; "last": the last axis
    container: int = 0  #: bits of what no quantiser touches; 0: as few as the precision allows
    autocast: bool = False  #: torch.autocast: parameters and the residual stream stay in fp32, products cast them

    def __post_init__(self) -> None:
        choice("box_axis", self.box_axis, get_args(BoxAxis))

    @property
    def container_bits(self) -> int:
        """Width `a` of tensors no quantiser touches (residual stream, softmax, norms): 16 if q0..q3 fit, else 32,
        unless told."""
        return self.container or (MAX_PACKED_BITS if max(self.precision) <= MAX_PACKED_BITS else WIDEST)

    def layout(self, outer: int, rows: int, columns: int, boxes: str) -> Layout:
        """The layout of an (outer, rows, columns) tensor whose contraction axis is `boxes`: "rows" or "columns"."""
        return Layout(outer, rows, columns, along_rows=boxes == "rows" and self.box_axis == "contraction")

    def __str__(self) -> str:
        return f"{self.format.name} {self.precision}"


FP32 = Setup(Identity(WIDEST), Precision(32, 32, 32, 32))
BF16 = Setup(Identity(WIDEST), Precision(16, 16, 16, 16))
AUTOCAST = replace(BF16, autocast=True)
DSQ = format_class(DEFAULT)(WIDEST)  #: the default format

Bits = Any


def by_width(bits: int, value: Callable[[int], float]) -> Any:
    """``value`` of the width."""
    return value(bits)


@lru_cache(maxsize=1024)
def at_width(template: Format, bits: int) -> Format:
    return template.at(bits)
