"""Which module made a node of the autograd graph."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks


def next_node() -> int:
    """The number that autograd gives the next node made in this thread."""
    return torch._C._autograd._get_sequence_nr()


class ModuleRuns:
    """(first sequence number, module) each time the innermost running module changes; autograd numbers its nodes."""

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.changes: list[tuple[int, nn.Module | None]] = []
        self.names: dict[nn.Module, str] = {}
        self.weights: set[int] = set()  #: storages of the parameters and buffers of the modules that ran

    def enter(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():  # a compiled block is one node, its own
            return
        if not self.stack:
            self.names.update({m: name for name, m in module.named_modules() if m not in self.names})
            for t in (*module.parameters(), *module.buffers()):
                if t.layout is torch.strided:
                    self.weights.add(t.untyped_storage()._cdata)
        self.stack.append(module)
        self._note()

    def leave(self, module: nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling():
            return
        while self.stack and self.stack.pop() is not module:
            pass
        self._note()

    def _note(self) -> None:
        self.changes.append((next_node(), self.stack[-1] if self.stack else None))

    def module_at(self, sequence: int) -> str:
        found: nn.Module | None = None
        for start, module in self.changes:  # a few hundred entries, walked in order
            if start > sequence:
                break
            found = module
        return "" if found is None else self.names.get(found, type(found).__name__)


@contextmanager
def modules_run() -> Iterator[ModuleRuns]:
    runs = ModuleRuns()
    handles = [
        module_hooks.register_module_forward_pre_hook(runs.enter),
        module_hooks.register_module_forward_hook(runs.leave, always_call=True),
    ]
    try:
        yield runs
    finally:
        for handle in handles:
            handle.remove()
