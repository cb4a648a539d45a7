"""The one place where a policy sees a model's operations: a function mode, entered around each call of the model.

The mode looks each function up in the table (dsq/stash/table): a row runs in its stead, all else runs as it is.
torch.compile traces the mode into the graphs of a model, or of blocks, that were compiled before.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._C._autograd import SavedTensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import _checkpoint_hook

from dsq.layers import not_compiled_alone
from dsq.stash.codes import EXACT, Codec, Form, Kept, Stash, refuse_create_graph
from dsq.stash.controller import RUNNING, Controller, Summary, run_under
from dsq.stash.table import OF_MASKS, TABLE, Row

_PLAIN = (Tensor, nn.Parameter)
#: () -> the (pack, unpack) that a tensor saved now would go through; None: PyTorch keeps it as it is
innermost_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def in_backward() -> bool:
    """Return whether a backward is running in this thread: what is saved now is a recomputation's."""
    return torch._C._current_graph_task_id() != -1


def _own_body(func: FunctionType) -> FunctionType:
    """Return a function of torch.nn.functional that runs its own lines under a TorchFunctionMode.

    As it is, it would hand itself to the mode again. The copy differs in one name: the check for that always says no.
    """
    names = {**func.__globals__, "has_torch_function": lambda tensors: False}
    copy = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


#: what a router of experts calls: recomputed from rounded inputs, a segment with one would choose other experts, whose
#: tensors have other shapes
_CHOOSE = {torch.topk, Tensor.topk, torch.argmax, Tensor.argmax, torch.nonzero, Tensor.nonzero}

multi_head_attention_forward = _own_body(cast(FunctionType, F.multi_head_attention_forward))


class Interception(TorchFunctionMode):
    """The rows of the table in place of the functions, for one forward."""

    def __init__(self, stash: Stash, rows: Mapping[Callable[..., Any], Row] = TABLE) -> None:
        super().__init__()
        self.stash, self.rows = stash, rows
        self.segments_inputs: list[Any] | None = None  #: exact, of the checkpoint's segment that runs

    @not_compiled_alone
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:  # one call to a mode: its body makes calls with rows
            with self:
                return multi_head_attention_forward(*args, **kwargs)
        if func is Tensor.unflatten:  # Python's methods, which a compiler does not find in a dict, or trace here
            func = torch.unflatten
        elif func is Tensor.__pow__:
            func = torch.pow
        elif func is Tensor.__rsub__:
            func = torch.rsub
        elif func is Tensor.norm:
            func = torch.norm
        row = self.rows.get(func)
        if self.segments_inputs is not None and func in _CHOOSE:
            self.stash.segment.get_inputs = _Inputs(self.segments_inputs)
        if row is None or not torch.is_grad_enabled() or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        kwargs.pop("out", None)  # which F.normalize always names
        wanted = func in OF_MASKS
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                dense = type(value) in _PLAIN and value.layout is torch.strided  # a DTensor has operations of its own
                if not dense or value.is_complex():
                    return func(*args, **kwargs)
                wanted = wanted or value.requires_grad
        if not wanted:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling() and (innermost_hooks() is not None or self.stash.segment is not None):
            self._follow_checkpoint(segment_now())
        return row(self.stash, *args, **kwargs)

    def _follow_checkpoint(self, segment: Any) -> None:
        """Let a segment of torch.utils.checkpoint be recomputed under the policies that it runs under now."""
        if segment is not self.stash.segment:
            self.segments_inputs = None
            if segment is not None and getattr(segment.recompute_fn, "func", None) is not run_under:
                self.stash.enter_segment(None)
                segment.recompute_fn = partial(run_under, tuple(RUNNING.entered.items()), segment.recompute_fn)
                # empty where they are in codes already; PyTorch 2.11, which some GPU images have, keeps them elsewhere
                self.segments_inputs = getattr(segment, "saved_args", None) or None
                code_inputs(segment, lambda x: self.stash.code(x, "boundary"))
            self.stash.enter_segment(segment)


#: the pack hook of a checkpoint that does not re-enter: its one free variable is the frame of the segment (torch 2.13)
_PACK = next(it for it in _checkpoint_hook.__init__.__code__.co_consts if getattr(it, "co_name", "") == "pack_hook")


def segment_now() -> Any:
    """Return the segment of torch.utils.checkpoint whose forward this thread is in; None outside of all."""
    top = innermost_hooks()
    if top is None or not isinstance(top[0], FunctionType) or top[0].__code__ is not _PACK:
        return None
    return top[0].__closure__[0].cell_contents  # type: ignore[index]


def code_inputs(segment: Any, code: Callable[[Tensor], Kept]) -> None:
    """Have a segment keep by ``code`` its hidden states: its first tensor, and those of the same rank and width.

    Where hooks of other people hold them already, as TRL's ``activation_offloading`` does, they stay there, exact: such
    hooks may unpack a tensor once, and in a backward alone.
    """
    if not hasattr(segment, "saved_args"):  # PyTorch 2.11's: its inputs stay exact
        return
    hooks = (getattr(argument, "unpack_hook", None) for argument in segment.saved_args)  # of SavedTensors
    others = [it for it in hooks if it is not None and getattr(it, "__module__", "") != "torch.utils.checkpoint"]
    if others or isinstance(segment.get_inputs, _Inputs):
        return
    kept: list[Any] = []
    layout = None
    for argument in segment.saved_args:
        with torch.no_grad():  # an outer checkpoint's may be in codes, which are unpacked as in a backward
            x = argument.unpack() if isinstance(argument, SavedTensor) else None
        layout = layout or (None if x is None else (x.dim(), *x.shape[-1:]))
        hidden = x is not None and x.grad_fn is not None and (x.dim(), *x.shape[-1:]) == layout
        form = code(x) if x is not None and hidden else None
        kept.append(form if isinstance(form, Form) else argument)
    segment.get_inputs, segment.saved_args = _Inputs(kept), []


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a checkpoint's segment, hidden states in codes."""

    kept: list[Any]  #: values, SavedTensors, and Forms of what wants a gradient

    def __call__(self) -> list[Any]:
        return [self._value(item) for item in self.kept]

    def _value(self, item: Any) -> Any:
        if isinstance(item, SavedTensor):
            return item.unpack()
        if isinstance(item, Form):
            refuse_create_graph()
            return item.make(item.tensors).detach().requires_grad_()
        return item


class TablePolicy(Controller):
    """A policy that codes what the table lets it. Subclasses give the codec of a forward."""

    by_parts = True
    latest: Stash | None = None  #: of the latest training forward
    rows: Mapping[Callable[..., Any], Row] = TABLE  #: of the operations that it acts on

    def codec(self, module: nn.Module) -> Codec:
        """Return the codec of the forward that begins."""
        return EXACT

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        recomputing = in_backward()
        goes_on = len(self.parts) > 1 and not recomputing
        stash = self.latest if goes_on and self.latest else Stash(self.codec(module), is_sharded(module))
        if not recomputing:
            self.latest = stash
        RUNNING.stashes.append(stash)
        try:
            with Interception(stash, self.rows):
                yield
        finally:
            RUNNING.stashes.pop()
            stash.forget()

    def report(self) -> Summary:
        if self.latest is None:
            return Summary(self.name)
        return Summary(self.name, (), self.latest.raw_bytes, self.latest.kept_bytes, self.details())

    def details(self) -> tuple[str, ...]:
        """Return the lines of the policy's own in its report."""
        return ()


def is_sharded(model: nn.Module) -> bool:
    """Return whether ``fully_shard`` sharded ``model``, or a part of it: weights are there for its own passes alone."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(module, fsdp.FSDPModule) for module in model.modules())


def stash_now() -> Stash:
    """Return the stash of the policy of the table in whose forward this thread is; one that codes nothing without one.
    For autograd functions of other policies, and operators of compiled graphs."""
    return RUNNING.stashes[-1] if RUNNING.stashes else Stash(EXACT)
