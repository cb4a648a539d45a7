from . import functional, stash, workload
from .config import DSQConfig
from .conversion import convert, converted, set_level, unconvert
from .coverage import Coverage, report
from .dynamic import DynamicPrecision
from .formats import BFP, FixedPoint, Identity
from .kernels.dispatch import fused_attention
from .linear import Linear
from .packing import Packed, pack, quantize
from .precision import Precision, parse_levels
from .process_memory import give_memory_back
from .quantizers import Quantizers
from .scheduler import PrecisionScheduler

__version__: str

__all__ = [
    "BFP",
    "Coverage",
    "DSQConfig",
    "DynamicPrecision",
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
    "fused_attention",
    "give_memory_back",
    "pack",
    "parse_levels",
    "quantize",
    "report",
    "set_level",
    "stash",
    "unconvert",
    "workload",
]
