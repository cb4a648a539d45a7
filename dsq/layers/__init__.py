"""The quantized selves of layers other than nn.Linear.

attention.py            nn.MultiheadAttention
own_products.py         modules that multiply by parameters of their own, or queries by keys, in their forward
experts_and_patches.py  transformers' experts, in parameters of three dimensions; nn.Conv2d that cuts patches
forwards.py             what bounds a forward of a converted model
of_transformers.py      GPT-2's Conv1D; attention in models of transformers (imports transformers)

Below: classes made of a mixin and of a class that is met only when a model is converted; and what a compiler is not
to take by itself.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch._C._dynamo import eval_frame


class Mixed:
    """A mixin whose mixed classes can be pickled and copied; ``plain`` is the other class."""

    plain: ClassVar[type[nn.Module]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self._mixin, self.plain), self.__dict__

    _mixin: ClassVar[type["Mixed"]]


_made: dict[tuple[type, type], type[nn.Module]] = {}


def mixed(mixin: type[Mixed], plain: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules of ``plain`` with ``mixin`` before it."""
    key = mixin, plain
    if key not in _made:
        _made[key] = type(f"{mixin.__name__}{plain.__name__}", key, {"plain": plain, "_mixin": mixin})
    return _made[key]


def _new(mixin: type[Mixed], plain: type[nn.Module]) -> nn.Module:
    kind = mixed(mixin, plain)
    return kind.__new__(kind)


_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def not_compiled_alone(function: Callable[..., Any]) -> Any:
    """Let torch.compile trace ``function`` inside a graph, but run it and what it calls as they are outside of one.

    torch._dynamo.skip_code without its import, which takes a second. A mode that is on where a graph breaks sees
    calls such as ``x.device`` there. Compiled by itself it would answer them with an earlier call's code: dynamo tells
    their functions apart by addresses that are used again (torch 2.13).
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIPPED)
    return function
