"""Saved tensors: one interface for the policies that shrink them, and a meter of their bytes.

controller = dsq.stash.apply(model, "gact", bits=4)   # in place; policies() lists the names
...                                                   # a plain loop: model(x), loss, backward
print(controller.report()); controller.remove()

print(dsq.stash.measure(lambda: model(x).sum()))      # bytes saved for the backward, by operation

x = dsq.stash.packed_checkpoint(block, x)             # checkpoints whose saved inputs are packed

Start reading in rules/ (what is saved of each operation), then saved_forms.py and stash.py (how; with memory.py and
segment_inputs.py), interception.py and controller.py (when). methods/ has a file for each policy (policy.py applies
them), graphs/ what compiled models save, meter.py the bytes that are saved.
docs/extending.md has a whole policy in 20 lines.
"""

from dsq.stash import methods  # noqa: F401 - registers the policies
from dsq.stash.controller import Controller, PolicyStatus
from dsq.stash.meter import SavedTensor, StashProfile, measure
from dsq.stash.methods.checkpoint import packed_checkpoint
from dsq.stash.policy import apply, policies, register

__all__ = [
    "Controller",
    "PolicyStatus",
    "SavedTensor",
    "StashProfile",
    "apply",
    "measure",
    "packed_checkpoint",
    "policies",
    "register",
]
