"""Rules around one call of a PyTorch function: in what form its saved tensors are kept."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from dsq.stash.hooks import Hooks, innermost_hooks
from dsq.stash.selective.forms import Saved, get

PackOne = Callable[[Tensor], Saved | None]  # None: as it is, or as the policies further out want it
PackByRule = Callable[[PackOne, Tensor], Saved | None]  # what a policy does around a rule's pack, to count it say


class Call(NamedTuple):
    """One call of a function."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """The argument of that position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def decided_further_out(self) -> bool:
        """Whether the rules of a policy further out decide before the one that is asked now."""
        mode = _get_current_function_mode()
        return isinstance(mode, Rules) and self.func in mode.table


class Replacement(NamedTuple):
    """What to run instead of a call, how what that saves is kept, and what its backward is given of it."""

    run: Callable[[], Tensor]
    pack_one: PackOne
    unpack: Callable[[Any], Tensor]


Rule = Callable[[Call], PackOne | Replacement | None]  # None: nothing to gain in this call
RuleTable = dict[Callable[..., Any], Rule]  # by function


class Rules(TorchFunctionMode):
    """While entered, calls of functions in the table are made under their rules; ``pack_by_rule`` applies the packs.

    Rules act while ``hooks`` are the innermost: torch.utils.checkpoint's count saved tensors, and compare them with
    those of the recomputation, where no rule acts.
    """

    def __init__(self, table: RuleTable, pack_by_rule: PackByRule, hooks: Hooks) -> None:
        super().__init__()
        self.table, self.pack_by_rule, self.hooks = table, pack_by_rule, hooks

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = self.table.get(func)
        acts = rule is not None and torch.is_grad_enabled() and innermost_hooks() == self.hooks
        decision = rule(Call(func, args, kwargs)) if rule is not None and acts else None
        if decision is None:
            return func(*args, **kwargs)
        run, pack_one, unpack = decision if isinstance(decision, Replacement) else (None, decision, get)
        with saved_tensors_hooks(partial(self._pack, pack_one), unpack):
            return func(*args, **kwargs) if run is None else run()

    def _pack(self, pack_one: PackOne, tensor: Tensor) -> Any:
        saved = self.pack_by_rule(pack_one, tensor)
        return self.hooks[0](tensor) if saved is None else saved


def needs(x: Any) -> bool:
    """Whether a gradient of ``x`` is wanted."""
    return isinstance(x, Tensor) and x.requires_grad
