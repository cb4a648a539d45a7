"""What is kept between forward and backward: one interface, five policies, one meter.

controller = dsq.stash.apply(model, "gact", bits=4)   # in place; policies() lists the names
...                                                   # a plain loop: model(x), loss, backward
print(controller.report()); controller.remove()

print(dsq.stash.measure(lambda: model(x).sum()))      # bytes kept for the backward, by tensor and module; peak memory
"""

# Importing a policy's file registers it: one name a line here.
from dsq.stash import mesa as mesa
from dsq.stash.policy import Controller, Summary, apply, policies, register

__all__ = ["Controller", "Summary", "apply", "policies", "register"]
