"""The meter: what a forward keeps for its backward, wherever it is held, and the peak of memory.

report.py        measure(), and what it found
graph.py         the autograd graph weighed: saved tensors in the form a hook gave them, and what Functions put on a ctx
live_tensors.py  what was there before the forward, and what no graph shows
module_runs.py   which module made a node
observation.py   what the converted layers of a model in training stash, for its loggers
resident.py      memory that the process occupies
peak.py          the most that PyTorch's allocators held at once
"""

from dsq.stash.meter.graph import GraphMeter, Held
from dsq.stash.meter.report import Report, measure

__all__ = ["GraphMeter", "Held", "Report", "measure"]
