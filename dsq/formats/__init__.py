"""Number formats: a file a format. They know numbers of bits, neither tensors nor torch: the cost model has them too.

base.py         what every format states; the registry
layout.py       how a packed tensor lies in memory
bfp.py, ...     a format each; every file of this folder is imported here, so that a new one needs no other line
"""

from importlib import import_module
from pkgutil import iter_modules

from dsq.formats.base import (
    BOX,
    DEFAULT,
    FORMATS,
    MAX_PACKED_BITS,
    NARROWEST,
    WIDEST,
    Format,
    Law,
    check_stored,
    format_class,
    named,
    options,
    parse_format,
)
from dsq.formats.bfp import BFP
from dsq.formats.fixed_point import FixedPoint
from dsq.formats.identity import Identity
from dsq.formats.layout import BoxAxis, Layout

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

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
    "check_stored",
    "format_class",
    "named",
    "options",
    "parse_format",
]
