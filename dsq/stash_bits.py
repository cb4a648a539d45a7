"""The bits in which the policies of dsq.stash save a value, for the policies and for dsq-cost. Imports no torch.

Which tensors an operation saves, its rule says (dsq/stash/rules). dsq-cost's ledger (costmodel/model/ledger.py) names
the same tensors by the same words, and analysis/memory/prediction.py compares it with running models.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

#: the role of a saved tensor, by which a policy gives it bits
Role = Literal[
    "linear",
    "product",
    "convolution",
    "softmax",
    "attention",
    "layernorm",
    "groupnorm",
    "batchnorm",
    "activation",
    "factor",
    "boundary",
]

MAX_EXACT_NUMEL = 256  #: values up to which a tensor is saved exact
#: bits that policy bfp gives to some tensors beside q1's (docs/stash-policies.md has the measurements)
EXTRA_BITS: Mapping[Role, int] = MappingProxyType(
    dict.fromkeys(("attention", "softmax", "activation", "layernorm", "groupnorm", "batchnorm"), 2)
)
MIN_BITS = 4  #: of policy bfp, whatever q1: with 3 the generated corpus lost 2 BLEU, with 4 none
GRAPH_EXTRA_BITS = 2  #: beside q1's, of every tensor that a compiled graph packs (dsq/stash/graphs/partitioner.py)
MAX_GRAPH_BITS = 8
MESA_BITS = 8
GACT_GROUP = 256  #: values that share a low and a step, two floats of 32 bits
