"""How often one forward calls each layer: an adaptive solver, or a fixed point, may not end on rounded products."""

import warnings

from torch import Tensor

#: calls of a layer in one forward that go without a warning
MAX_CALLS = 100
#: calls of layers in one training forward, by the id of their weight
Calls = dict[int, int]


def count_call(calls: Calls, weight: Tensor) -> None:
    """Count a call of the layer of ``weight``, with gradients or without, and warn of more than MAX_CALLS."""
    count = calls[id(weight)] = calls.get(id(weight), 0) + 1
    if count == MAX_CALLS + 1:
        text = f"a layer of {tuple(weight.shape)} was called over {MAX_CALLS} times in one forward: a loop until "
        text += "results agree, as an adaptive solver or a fixed point, may not end on rounded products; "
        warnings.warn(f"{text}leave its layers out by DSQConfig(exclude=...), or bound its steps", stacklevel=2)
