"""dsq: dynamic stashing quantization for PyTorch."""

from pathlib import Path

if not (Path(__file__).parent / "kernels").is_dir():
    # a source checkout: kernels/ lies beside dsq/, where an installed wheel has it inside (see pyproject.toml)
    __path__.append(str(Path(__file__).parent.parent))

from dsq.formats import BFP, FixedPoint, Identity
from dsq.packing import Packed, pack, quantize

__all__ = ["BFP", "FixedPoint", "Identity", "Packed", "pack", "quantize"]
