"""How many bits more than q1 the table gives to what an operation keeps, by the error of the whole gradient.

Measured on a GPT late in its training (python -m analysis.stash.bits): attention is where few bits hurt most, the more
the longer a model has trained, then what goes into an activation, whose result is made again from it.
"""

from collections.abc import Mapping
from types import MappingProxyType

from dsq.stash.codes import What

MORE: Mapping[What, int] = MappingProxyType({"attention": 2, "softmax": 2, "activation": 2})
