"""How many bits more than q1 the table gives to what an operation keeps, by the error of the whole gradient.

A GPT of 4 blocks, d 192, on WikiText's characters, after 700 updates (python -m analysis.stash.bits, Zen 4,
2026-11-25): error of the gradient of all parameters, products exact, and bits of a token, a unit of width and a block.

    linears' inputs alone at 4                                  .032
    all at 4                                             46.5   .077
    attention 6                                          52.5   .043
    attention 6, activations 6                           60.5   .039
    attention 6, activations 6, norms 5                  62.8   .028
    attention 6, activations 6, norms 6 (as below)       65.0   .025
    all at 5                                             56.8   .040

Attention is where few bits hurt most, the more the longer a model has trained. A norm's x^ serves the linear layer
behind it too: its bits are the cheapest.
"""

from collections.abc import Mapping
from types import MappingProxyType

from dsq.stash.codes import What

MORE: Mapping[What, int] = MappingProxyType({"attention": 2, "softmax": 2, "activation": 2, "norm": 2})
