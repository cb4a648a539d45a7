"""The methods of training that a plan compares unless told."""

from costmodel.model.entries import POLICIES
from costmodel.model.memory import Method
from costmodel.model.quantisation import AUTOCAST, BF16, DSQ, FP32, Setup
from dsq.precision import DEFAULT_LEVELS, Precision

LEVELS = (Precision(16, 4, 4, 16), *DEFAULT_LEVELS)  # the paper's last, and ours
USUAL = (
    Method("fp32", FP32),
    Method("bf16 autocast", AUTOCAST),
    Method("bf16", BF16),
    *(Method(f"dsq {level}", Setup(DSQ, level)) for level in LEVELS),
    *(Method(f"bf16, {name}", BF16, stash=stash) for name, stash in POLICIES.items()),
    Method("bf16, recompute", BF16, recompute=True),
    Method("bf16, recompute, bfp 4", BF16, stash=POLICIES["bfp 4"], recompute=True),
)
