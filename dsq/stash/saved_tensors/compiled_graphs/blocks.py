"""Compiled models, and blocks that torch.compile compiles one by one: their stash goes through the policy's hooks.

A compiled graph is one autograd function. What it saves passes the hooks when its forward ends, without a history, and
is unpacked when its backward begins, all of it: at the peak one block's stash is there unpacked. What a graph packs by
itself (packing.py) is codes by then, and unpacked one by one.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode

from dsq.stash.compiled import compiled_blocks, forget_compiled
from dsq.stash.controller import Controller, SharedByCopies
from dsq.stash.saved_tensors.forms import Saved, get
from dsq.stash.saved_tensors.forward_stash import ForwardStash, GraphPacking
from dsq.stash.saved_tensors.hooks import innermost_hooks
from dsq.stash.saved_tensors.rules.function_mode import ForwardMode
from dsq.stash.saved_tensors.storages import storages_of


def around_compiled_blocks(controller: Controller, model: nn.Module) -> None:
    """Let the ForwardStash that is entered around the model's forward see what its compiled blocks save."""
    graphs = _Graphs()
    for block, name in list(compiled_blocks(model)):
        run = getattr(block, name)
        setattr(block, name, CompiledBlock(block, run, graphs))
        controller.undo.callback(_restore, block, name, run)
    controller.undo.callback(forget_compiled)


def note_of_graphs(model: nn.Module, stash: ForwardStash) -> tuple[str, ...]:
    """What a report of the bytes of ``stash`` says where graphs pack by themselves."""
    packs = stash.in_graphs is not None and next(compiled_blocks(model), None) is not None
    return ("both figures have what compiled graphs packed by themselves in its packed form",) if packs else ()


def _restore(block: nn.Module, name: str, run: Callable[..., Any]) -> None:
    if isinstance(getattr(block, name), CompiledBlock):  # a copy of a block is made without
        setattr(block, name, run)


@dataclass
class _Graphs:
    """How the graphs of a model pack."""

    packing: GraphPacking | None = None

    def context(self, packing: GraphPacking | None) -> AbstractContextManager[Any]:
        """Around a call that may compile. Graphs that pack in another way are made again."""
        if self.packing not in (None, packing):
            forget_compiled()
        self.packing = packing
        if packing is None:
            return nullcontext()
        from dsq.stash.saved_tensors.compiled_graphs.packing import graphs_pack  # torch._inductor takes seconds

        return graphs_pack(packing)


class CompiledBlock(SharedByCopies):
    """The call of a compiled block."""

    def __init__(self, block: nn.Module, run: Callable[..., Any], graphs: _Graphs) -> None:
        self.block, self.run, self.graphs = block, run, graphs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stash = _innermost_stash()
        from dsq.stash.saved_tensors.compiled_graphs.exact import marked  # torch._inductor takes seconds

        with ExitStack() as stack:
            stack.enter_context(_without_modes())
            stack.enter_context(marked(self.block))  # without hooks too: the graph serves the next call with them
            if stash is not None:
                stack.enter_context(self.graphs.context(stash.in_graphs))
                stack.enter_context(saved_tensors_hooks(_pack_of(stash, storages_of((args, kwargs))), get))
            return self.run(*args, **kwargs)


def _innermost_stash() -> ForwardStash | None:
    """That of the policy whose pack hook is the innermost; mesa's hook is a mode's that has one."""
    hooks = innermost_hooks()
    owner = None if hooks is None else getattr(hooks[0], "__self__", None)
    stash = getattr(owner, "stash", owner)
    return stash if isinstance(stash, ForwardStash) else None


def _pack_of(stash: ForwardStash, given: set[int]) -> Callable[[Tensor], Saved]:
    """given: storages of what the block was called with. Other tensors that a graph saves are its own."""

    def pack(tensor: Tensor) -> Saved:
        known = tensor.requires_grad or tensor.untyped_storage()._cdata in given
        return stash.pack(tensor, wanted=not known and _saved_by_graph())

    untraced: Callable[[Tensor], Saved] = sys.modules["torch._dynamo"].disable(pack)  # where a graph breaks
    return untraced


def _saved_by_graph() -> bool:
    """Whether a compiled graph saves now, no operation between two graphs: by the callers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not CompiledBlock.__call__.__code__:
        if "_aot_autograd" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


@contextmanager
def _without_modes() -> Iterator[None]:
    """They see no operation of a graph, and would be traced into it."""
    modes = []
    while isinstance(_get_current_function_mode(), ForwardMode):
        modes.append(_pop_mode())
    try:
        yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
