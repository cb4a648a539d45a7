"""What is kept between forward and backward: one interface, six policies, one meter.

controller = dsq.stash.apply(model, "gact", bits=4)   # in place; policies() lists the names
...                                                   # a plain loop: model(x), loss, backward
print(controller.report()); controller.remove()

print(dsq.stash.measure(lambda: model(x).sum()))      # bytes kept for the backward, by tensor and module; peak memory
"""

# Importing a policy's file registers it: one name a line here.
from dsq.stash import bfp as bfp
from dsq.stash import checkpoint as checkpoint
from dsq.stash import gact as gact
from dsq.stash import mesa as mesa
from dsq.stash import selective as selective
from dsq.stash import wtacrs as wtacrs
from dsq.stash.meter import Held, Report, measure
from dsq.stash.policy import Controller, Summary, apply, policies, register

__all__ = ["Controller", "Held", "Report", "Summary", "apply", "measure", "policies", "register"]
