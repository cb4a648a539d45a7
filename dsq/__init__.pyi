from . import functional, stash, workload
from .config import DSQConfig
from .conversion import convert, converted, set_level
from .formats import BFP, FixedPoint, Identity
from .linear import Linear, Quantizers
from .packing import Packed, pack, quantize
from .precision import Precision, parse_levels
from .scheduler import PrecisionScheduler

__all__ = [
    "BFP",
    "DSQConfig",
    "FixedPoint",
    "Identity",
    "Linear",
    "Packed",
    "Precision",
    "PrecisionScheduler",
    "Quantizers",
    "convert",
    "converted",
    "functional",
    "pack",
    "parse_levels",
    "quantize",
    "set_level",
    "stash",
    "workload",
]
