"""Rules around one call of a PyTorch function: in what form its saved tensors are kept."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any, NamedTuple

from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from dsq.stash.saved_tensors.forms import Saved, get
from dsq.stash.saved_tensors.hooks import op_hooks, rules_may_act

PackOne = Callable[[Tensor], Saved | None]  # None: as it is, or as the policies further out want it
PackByRule = Callable[[PackOne, Tensor], Saved | None]  # what a policy does around a rule's pack, to count it say
NoteCall = Callable[[Callable[..., Any], Mapping[str, Any]], None]  # function and keyword arguments, before each call


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


class ForwardMode(TorchFunctionMode):
    """What a policy enters around a forward to see its operations; compiled graphs run without."""


class Rules(ForwardMode):
    """While entered, calls of functions in the table are made under their rules; ``pack_by_rule`` applies the packs."""

    def __init__(
        self, table: RuleTable, pack_by_rule: PackByRule | None = None, note_call: NoteCall | None = None
    ) -> None:
        super().__init__()
        self.table, self.pack_by_rule, self.note_call = table, pack_by_rule, note_call

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.note_call is not None:
            self.note_call(func, kwargs)
        rule = self.table.get(func)
        decision = rule(Call(func, args, kwargs)) if rule is not None and rules_may_act() else None
        if decision is None:
            return func(*args, **kwargs)
        run, pack_one, unpack = decision if isinstance(decision, Replacement) else (None, decision, get)
        with op_hooks(pack_one if self.pack_by_rule is None else partial(self.pack_by_rule, pack_one), unpack):
            return func(*args, **kwargs) if run is None else run()


def writes_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a PyTorch function may write into a tensor it is given, by its name and arguments."""
    return _in_place(getattr(func, "__name__", "")) or "out" in kwargs or bool(kwargs.get("inplace"))


@lru_cache(maxsize=4096)
def _in_place(name: str) -> bool:
    return name.endswith("_") and (not name.endswith("__") or name.startswith(("__i", "__set")))


def needs(x: Any) -> bool:
    """Whether a gradient of ``x`` is wanted."""
    return isinstance(x, Tensor) and x.requires_grad
