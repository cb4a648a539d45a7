"""Quantized classes of layers other than nn.Linear.

attention.py            nn.MultiheadAttention
own_products.py         modules that multiply by parameters of their own, or queries by keys, in their forward
experts_and_patches.py  transformers' experts, in parameters of three dimensions; nn.Conv2d of non-overlapping patches
blocks.py               the repeated blocks of a model, and what stays in floating point at both ends
forwards.py             hooks that mark the begin and the end of a converted model's forward
of_transformers.py      GPT-2's Conv1D; attention in models of transformers (imports transformers)

This file: classes that join a mixin with a class of the user's model, and functions that are not compiled alone.
"""

from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn
from torch._C._dynamo import eval_frame


class Mixed:
    """A mixin for classes of ``mixed``, whose modules can be pickled and copied; ``original`` is the other class."""

    original: ClassVar[type[nn.Module]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self._mixin, self.original), self.__dict__

    _mixin: ClassVar[type["Mixed"]]


_classes: dict[tuple[type, type], type[nn.Module]] = {}


def mixed(mixin: type[Mixed], original: type[nn.Module]) -> type[nn.Module]:
    """Return the class of modules of ``original`` with ``mixin`` before it."""
    key = mixin, original
    if key not in _classes:
        _classes[key] = type(f"{mixin.__name__}{original.__name__}", key, {"original": original, "_mixin": mixin})
    return _classes[key]


def _new(mixin: type[Mixed], original: type[nn.Module]) -> nn.Module:
    kind = mixed(mixin, original)
    return kind.__new__(kind)


_SKIPPED = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def not_compiled_alone(function: Callable[..., Any]) -> Any:
    """Let torch.compile trace ``function`` inside a graph, but run it and its callees eagerly outside of one.

    This is torch._dynamo.skip_code without its import, which takes a second. A mode that is active at a graph break
    sees calls such as ``x.device``. Compiled alone, it would run an earlier call's code for them, because dynamo
    identifies their functions by addresses that are reused (torch 2.13).
    """
    eval_frame.set_code_exec_strategy(function.__code__, _SKIPPED)
    return function
