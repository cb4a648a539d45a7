"""dsq: dynamic stashing quantization for PyTorch."""

from pathlib import Path

if not (Path(__file__).parent / "kernels").is_dir():
    # a source checkout: kernels/ lies beside dsq/, where an installed wheel has it inside (see pyproject.toml)
    __path__.append(str(Path(__file__).parent.parent))

from dsq import functional, kernels, stash, workload
from dsq.config import DSQConfig, Quantizers
from dsq.conversion import convert, converted, set_level
from dsq.formats import BFP, FixedPoint, Identity
from dsq.linear import Linear
from dsq.packing import Packed, pack, quantize
from dsq.precision import Precision, parse_levels
from dsq.scheduler import PrecisionScheduler

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
    "kernels",
    "pack",
    "parse_levels",
    "quantize",
    "set_level",
    "stash",
    "workload",
]
