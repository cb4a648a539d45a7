"""Rules around one call of a PyTorch function: in what form its saved tensors are kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode

from dsq.stash.hooks import op_hooks, rules_may_act
from dsq.stash.masked_relu import RELUS, stand_in


class Saved(Protocol):
    """A saved tensor in some form; get() gives the tensor, or one that the op's backward cannot tell from it.

    A form that is the mask of a ReLU's result has mask_bits besides: the bits, or None once it is no mask any more.
    """

    def get(self) -> Tensor: ...


PackOne = Callable[[Tensor], Saved | None]  # None: as it is, or as the policies further out want it
Rule = Callable[["Call"], PackOne | None]  # None: nothing to gain in this call
Form = Callable[[PackOne, Tensor], Saved | None]  # what a policy does around the pack of a rule
NoteCall = Callable[[Callable[..., Any], Mapping[str, Any]], None]  # function and keyword arguments, before each call


class Call(NamedTuple):
    """The arguments of one call."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    def get(self, position: int, name: str, default: Any = None) -> Any:
        """The argument of that position or name."""
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)


def bits_or_tensor(saved: Any) -> Tensor:
    """What is kept of a tensor for one of our functions: the bits of its mask, if that is all, or the tensor."""
    bits = getattr(saved, "mask_bits", None)
    return saved.get() if bits is None else bits


class Rules(TorchFunctionMode):
    """While entered, calls of the functions in the table are made under their rules, whose packs ``form`` applies."""

    def __init__(
        self, table: Mapping[Callable[..., Any], Rule], form: Form | None = None, note_call: NoteCall | None = None
    ) -> None:
        super().__init__()
        self.table, self.form, self.note_call = table, form, note_call

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.note_call is not None:
            self.note_call(func, kwargs)
        rule = self.table.get(func)
        if rule is None or not rules_may_act():
            return func(*args, **kwargs)
        call = Call(args, kwargs)
        pack = rule(call)
        if pack is None:
            return func(*args, **kwargs)
        ours = stand_in(func, call) if func in RELUS and not _left_to_another(func) else None
        if ours is not None:
            run, pack = ours
            with op_hooks(self._formed(pack), bits_or_tensor):
                return run()
        with op_hooks(self._formed(pack)):
            return func(*args, **kwargs)

    def _formed(self, pack: PackOne) -> PackOne:
        return pack if self.form is None else partial(self.form, pack)


def _left_to_another(func: Any) -> bool:
    """Whether the rules of a policy further out decide before these."""
    further_out = _get_current_function_mode()
    return isinstance(further_out, Rules) and func in further_out.table


def writes_in_place(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of a PyTorch function may write into a tensor it is given, by its name and arguments."""
    name = getattr(func, "__name__", "")
    named_so = name.endswith("_") and (not name.endswith("__") or name.startswith(("__i", "__set")))
    return named_so or "out" in kwargs or bool(kwargs.get("inplace"))


def needs(x: Any) -> bool:
    """Whether a gradient of ``x`` is wanted."""
    return isinstance(x, Tensor) and x.requires_grad
