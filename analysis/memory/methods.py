"""Ways to train that the check of predicted memory compares."""

from dataclasses import dataclass, field
from typing import Any

from costmodel.model import memory
from costmodel.model.entries import POLICIES
from costmodel.model.quantisation import AUTOCAST, DSQ, FP32, Setup
from dsq.precision import Precision


@dataclass(frozen=True)
class CheckedMethod:
    """How a model runs (the first fields), and what is predicted (the last)."""

    name: str
    predicted: memory.Method
    autocast: bool = False
    levels: str = ""  #: of dsq.convert, on a model in bfloat16
    policy: str = ""  #: of dsq.stash
    options: dict[str, Any] = field(default_factory=dict)
    frozen: bool = False  #: its linear layers are not trained


#: linear layers by their names in a workload; experts are none
LINEARS = r"^(?!.*experts).*(_proj|fc\d|router|dense|output_projection)$"
#: the blocks of every stack: a name whose first number is its last part
BLOCKS = r"\D*\.\d+"


def _dsq(levels: str) -> CheckedMethod:
    setup = Setup(DSQ, Precision.parse(levels))
    return CheckedMethod(f"dsq {levels}", memory.Method("", setup), levels=levels)


METHODS = (
    CheckedMethod("fp32", memory.Method("", FP32)),
    CheckedMethod("bf16 autocast", memory.Method("", AUTOCAST), autocast=True),
    _dsq("[16,4,4,16]"),
    _dsq("[2,2,2,16]"),
    CheckedMethod("bfp 4", memory.Method("", FP32, stash=POLICIES["bfp 4"]), policy="bfp", options={"bits": 4}),
    CheckedMethod(
        "gact 4",
        memory.Method("", FP32, stash=POLICIES["gact 4"]),
        policy="gact",
        options={"bits": 4, "adapt_interval": None},
    ),
    CheckedMethod("mesa", memory.Method("", FP32, stash=POLICIES["mesa"]), policy="mesa"),
    CheckedMethod(
        "wtacrs 0.3", memory.Method("", FP32, stash=POLICIES["wtacrs 0.3"]), policy="wtacrs", options={"ratio": 0.3}
    ),
    CheckedMethod(
        "checkpoint", memory.Method("", FP32, recompute=True), policy="checkpoint", options={"segments": BLOCKS}
    ),
    CheckedMethod(
        "selective, frozen",
        memory.Method("", FP32, stash=POLICIES["selective"]),
        policy="selective",
        frozen=True,
    ),
)
