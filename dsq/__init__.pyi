from . import functional, stash, workload
from .config import DSQConfig
from .conversion import convert, converted, set_level, unconvert
from .conversion_report import ConversionReport, Flops, report
from .dynamic import DynamicPrecision
from .formats import BFP, FixedPoint, Format, Identity
from .gradient_check import GradientCheck, ParameterGradient
from .kernels.dispatch import fused_attention
from .linear import Linear
from .packing import Packed, pack, quantize
from .precision import Precision, parse_levels
from .process_memory import release_memory
from .quantizers import Quantizers
from .scheduler import PrecisionScheduler
from .skipped import SkippedModule
from .stash.graphs.compiled import compile, inductor_options

__version__: str

__all__ = [
    "BFP",
    "ConversionReport",
    "DSQConfig",
    "DynamicPrecision",
    "FixedPoint",
    "Flops",
    "Format",
    "GradientCheck",
    "Identity",
    "Linear",
    "Packed",
    "ParameterGradient",
    "Precision",
    "PrecisionScheduler",
    "Quantizers",
    "SkippedModule",
    "compile",
    "convert",
    "converted",
    "functional",
    "fused_attention",
    "inductor_options",
    "pack",
    "parse_levels",
    "quantize",
    "release_memory",
    "report",
    "set_level",
    "stash",
    "unconvert",
    "workload",
]
