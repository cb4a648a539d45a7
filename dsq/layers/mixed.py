"""Classes made of a mixin and of a class that is met only when a model is converted."""

from functools import cache
from typing import Any, ClassVar

from torch import nn


class Mixed:
    """A mixin whose mixed classes can be pickled and copied; ``plain`` is the other class."""

    plain: ClassVar[type[nn.Module]]

    def __reduce__(self) -> tuple[Any, ...]:
        return _new, (self._mixin, self.plain), self.__dict__

    _mixin: ClassVar[type["Mixed"]]


@cache
def mixed(mixin: type[Mixed], plain: type[nn.Module]) -> type[nn.Module]:
    """The class of modules of ``plain`` with ``mixin`` before it."""
    return type(f"{mixin.__name__}{plain.__name__}", (mixin, plain), {"plain": plain, "_mixin": mixin})


def _new(mixin: type[Mixed], plain: type[nn.Module]) -> nn.Module:
    kind = mixed(mixin, plain)
    return kind.__new__(kind)
