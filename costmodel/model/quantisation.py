"""Setups that are costed: a number format, the axis of its boxes, the widths q0..q3, and the width of all else.

A format of the registry needs no line here: its name and its numeric fields are what a user may say of it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, get_args

from dsq.arguments import choice
from dsq.formats import (
    DEFAULT,
    FORMATS,
    MAX_PACKED_BITS,
    WIDEST,
    BoxAxis,
    Format,
    Identity,
    Layout,
    format_class,
    options,
)
from dsq.precision import Precision, parse_levels


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

    @cached_property
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


@lru_cache(maxsize=1024)
def at_width(template: Format, bits: int) -> Format:
    return template.at(bits)


def format_names() -> tuple[str, ...]:
    return (*FORMATS, Identity.name)


def sizes(name: str) -> dict[str, int]:
    """The format's numeric fields and their defaults. One without a number (fixed point's binary point) costs nothing.

    Raises ValueError for an unknown name.
    """
    choice("format", name, format_names())
    fields = {} if name == Identity.name else options(name)
    return {field: default for field, default in fields.items() if type(default) is int}


def template(name: str, described: Mapping[str, Any]) -> Format:
    """The format with those of its sizes that `described` has; None or absent: the default. Raises ValueError."""
    given = {field: described[field] for field in sizes(name) if described.get(field) is not None}
    chosen: type[Format] = Identity if name == Identity.name else format_class(name)
    return chosen(WIDEST, **given)


def described_setup(described: Mapping[str, Any], precision: Precision) -> Setup:
    """The precision in the format, sizes, axis of boxes and container that `described` has, by the options' names."""
    fmt = template(described["format"], described)
    return Setup(fmt, precision, described["box_axis"], described.get("container") or 0)


def parse_setups(text: str, described: Mapping[str, Any]) -> list[Setup]:
    """One setup, or those of a schedule: "[16,4,4,16]", "bfp:[4,4,4,8]", "[4,3,3,8] [8,4,4,8]". Raises ValueError."""
    name, colon, widths = text.rpartition(":")
    levels = parse_levels(widths) if widths.count("[") > 1 else [Precision.parse(widths)]
    described = {**described, "format": name.strip().lower()} if colon else described
    return [described_setup(described, level) for level in levels]
