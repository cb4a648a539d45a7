"""Number formats: they know numbers of bits, neither tensors nor torch, so that the cost model has them too.

base.py         what every format states; the registry; how a packed tensor lies in memory
blocks.py       formats whose boxes share a scale
fixed_point.py  formats without boxes
"""

from dsq.formats.base import (
    BOX,
    DEFAULT,
    FORMATS,
    MAX_PACKED_BITS,
    NARROWEST,
    WIDEST,
    BoxAxis,
    Format,
    Law,
    Layout,
    format_class,
    named,
    options,
    parse_format,
    register,
)
from dsq.formats.blocks import BFP, SignedBFP, SignedNVInt
from dsq.formats.fixed_point import FixedPoint, Identity

__all__ = [
    "BFP",
    "BOX",
    "DEFAULT",
    "FORMATS",
    "MAX_PACKED_BITS",
    "NARROWEST",
    "WIDEST",
    "BoxAxis",
    "FixedPoint",
    "Format",
    "Identity",
    "Law",
    "Layout",
    "SignedBFP",
    "SignedNVInt",
    "format_class",
    "named",
    "options",
    "parse_format",
    "register",
]
