"""What is kept between forward and backward: one interface, a policy a folder, one meter.

controller = dsq.stash.apply(model, "gact", bits=4)   # in place; policies() lists the names
...                                                   # a plain loop: model(x), loss, backward
print(controller.report()); controller.remove()

print(dsq.stash.measure(lambda: model(x).sum()))      # bytes kept for the backward, by tensor and module; peak memory

x = dsq.stash.packed_checkpoint(block, x)             # checkpoints whose kept inputs are packed (boundaries.py)

Start reading in policy.py and controller.py, then bfloat16/ (a whole policy in one file), then saved_tensors/ (the
mechanism).
"""

import importlib
import pkgutil

from dsq.stash.boundaries import packed_checkpoint
from dsq.stash.controller import Controller, Summary
from dsq.stash.meter import Held, Report, measure
from dsq.stash.policy import apply, policies, register
from dsq.stash.suspension import suspended

# A policy registers itself when its folder is imported: adding one is adding a folder here.
for _folder in pkgutil.iter_modules(__path__):
    if _folder.ispkg:
        importlib.import_module(f"{__name__}.{_folder.name}")

__all__ = [
    "Controller",
    "Held",
    "Report",
    "Summary",
    "apply",
    "measure",
    "packed_checkpoint",
    "policies",
    "register",
    "suspended",
]
