"""Functions of torch.nn.functional whose inner calls a function mode is to see."""

from types import FunctionType


def own_body(func: FunctionType) -> FunctionType:
    """A function of torch.nn.functional that runs its own lines under a TorchFunctionMode.

    As it is, it would hand itself to the mode again. The copy differs in one name: the check for that always says no.
    """
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
