"""Which modules run, and how many heads they name."""

from collections import Counter
from functools import partial
from typing import Any

from torch import nn

from dsq.stash.compiled import compiled_blocks
from dsq.stash.controller import Controller, SharedByCopies

_HEAD_ATTRIBUTES = ("num_heads", "num_attention_heads", "n_heads", "n_head", "nhead", "heads")
_DEFAULT_GROUPS = 8  #: of a model in which no module names its heads


class RunningModules(SharedByCopies):
    """The stack of the modules that run, kept up to date by hooks on each until the controller is removed.

    Modules in compiled blocks are not seen: their hooks would be traced.
    """

    def __init__(self, controller: Controller, model: nn.Module, groups: int | None) -> None:
        self.groups = groups
        self.stack: list[tuple[str, nn.Module]] = [("", model)]  #: (path, module), outermost first
        self._heads = {module: heads for module in model.modules() if (heads := _heads_of(module))}
        named = Counter(self._heads.values())
        self.default_groups = groups or (named.most_common(1)[0][0] if named else _DEFAULT_GROUPS)
        inside = {module for block, _ in compiled_blocks(model) for module in block.modules()}
        for name, module in model.named_modules():
            if module in inside:
                continue
            controller.until_removed(
                module.register_forward_pre_hook(partial(self._enter, name), prepend=True),
                module.register_forward_hook(self._leave, always_call=True),
            )

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.stack.append((name, module))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.stack.pop()

    def path(self) -> str:
        """Of the innermost running module."""
        return self.stack[-1][0]

    def heads(self) -> int:
        """Groups of the innermost running module that names its heads."""
        if self.groups:
            return self.groups
        named = (self._heads[module] for _, module in reversed(self.stack) if module in self._heads)
        return next(named, self.default_groups)


def _heads_of(module: nn.Module) -> int | None:
    for name in _HEAD_ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None
