"""nn.MultiheadAttention's function, with inner calls that a function mode sees."""

from types import FunctionType
from typing import cast

from torch.nn import functional as F


def _own_body(func: FunctionType) -> FunctionType:
    """A function of torch.nn.functional that runs its own lines under a TorchFunctionMode.

    As it is, it would hand itself to the mode again. The copy differs in one name: the check for that always says no.
    """
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


multi_head_attention_forward = _own_body(cast(FunctionType, F.multi_head_attention_forward))
