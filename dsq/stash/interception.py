"""The one place where a policy sees a model's operations: a function mode, entered around each call of the model.

The mode looks each function up in the table (dsq/stash/table): a row runs in its stead, all else runs as it is.
torch.compile traces the mode into the graphs of a model, or of blocks, that were compiled before.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
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

from dsq.kept import What
from dsq.layers import not_compiled_alone
from dsq.stash.codes import Codec, Form, Stash, exact_form
from dsq.stash.controller import RUNNING, Controller, Summary, enter_mode, entered_now, run_under
from dsq.stash.table import TABLE, Row

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack, unpack

#: () -> the (pack, unpack) that a tensor saved now would go through; None: PyTorch keeps it as it is
innermost_hooks: Callable[[], Hooks | None] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)


def in_checkpoint() -> bool:
    """Whether a segment of torch.utils.checkpoint runs, or is recomputed: it counts the tensors that are saved."""
    top = innermost_hooks()
    return top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint"


def in_backward() -> bool:
    """Whether a backward is running in this thread: what is saved now is a recomputation's."""
    return torch._C._current_graph_task_id() != -1


def _own_body(func: FunctionType) -> FunctionType:
    """A function of torch.nn.functional that runs its own lines under a TorchFunctionMode.

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
        self.is_over = False  #: the forward: after Ctrl-C PyTorch may push the mode once more
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
        row = None if self.is_over else self.rows.get(func)
        if self.segments_inputs is not None and func in _CHOOSE:
            self.stash.segment.get_inputs = _Inputs(self.segments_inputs)
        if row is None or not torch.is_grad_enabled() or not _takes((*args, *kwargs.values())) or "out" in kwargs:
            return func(*args, **kwargs)
        if not torch.compiler.is_compiling():
            top = innermost_hooks()
            if top is not None or self.stash.segment is not None:
                self._follow_checkpoint(None if top is None else top[0])
        return row(self.stash, *args, **kwargs)

    def _follow_checkpoint(self, pack: Any) -> None:
        """Let a segment of torch.utils.checkpoint be recomputed under the policies that it runs under now."""
        segment = None
        if isinstance(pack, FunctionType) and pack.__code__ is _PACK:
            segment = pack.__closure__[0].cell_contents  # type: ignore[index]
        if segment is not self.stash.segment:
            self.segments_inputs = None
            if segment is not None and not isinstance(segment.recompute_fn, _UnderPolicies):
                self.stash.enter_segment(None)
                segment.recompute_fn = _UnderPolicies(segment.recompute_fn, entered_now())
                self.segments_inputs = segment.saved_args
                segment.get_inputs = _Inputs.of(segment.saved_args, self.stash)
                segment.saved_args = []
            self.stash.enter_segment(segment)


@dataclass(frozen=True)
class _Inputs:
    """The inputs of a checkpoint's segment: hidden states, the first tensor and those of its rank, in codes."""

    kept: list[Any]  #: values, SavedTensors, or pairs of a Form and whether a gradient is wanted

    @classmethod
    def of(cls, saved: list[Any], stash: Stash) -> "_Inputs":
        kept: list[Any] = []
        rank = None
        for argument in saved:
            with torch.no_grad():  # a packed checkpoint unpacks its own, as in a backward
                x = argument.unpack() if isinstance(argument, SavedTensor) else None
            if x is not None and rank is None:
                rank = x.dim()
            if x is not None and x.grad_fn is not None and x.dim() == rank:
                kept.append((stash.code(x, "boundary"), x.requires_grad))
            else:
                kept.append(argument)
        return cls(kept)

    def __call__(self) -> list[Any]:
        return [self._value(item) for item in self.kept]

    def _value(self, item: Any) -> Any:
        if isinstance(item, SavedTensor):
            return item.unpack()
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], Form):
            form, wanted = item
            return form.make(form.tensors).detach().requires_grad_(wanted)
        return item


@dataclass(frozen=True)
class _UnderPolicies:
    """A checkpoint's recomputation, under the policies of its forward."""

    run: Callable[..., Any]
    entered: tuple[tuple[Controller, nn.Module], ...]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return run_under(self.entered, self.run, *args, **kwargs)


def _takes(values: Iterable[Any]) -> bool:
    """Whether a row takes these: one wants a gradient, and none is a DTensor, say, which has operations of its own."""
    wanted = False
    for value in values:
        if isinstance(value, Tensor):
            if type(value) is not Tensor and type(value) is not nn.Parameter:
                return False
            wanted = wanted or value.requires_grad
    return wanted


#: the pack hook of a checkpoint that does not re-enter: its one free variable is the frame of the segment (torch 2.13)
_PACK = next(it for it in _checkpoint_hook.__init__.__code__.co_consts if getattr(it, "co_name", "") == "pack_hook")


class TablePolicy(Controller):
    """A policy that codes what the table lets it. Subclasses give the codec of a forward."""

    by_parts = True
    latest: Stash | None = None  #: of the latest training forward
    parts: frozenset[int] = frozenset()  #: ids of those that were called by themselves, one after another
    rows: Mapping[Callable[..., Any], Row] = TABLE  #: of the operations that it acts on

    def codec(self, module: nn.Module) -> Codec:
        """The codec of the forward that begins."""
        raise NotImplementedError

    def traced_codec(self) -> Codec | None:
        """The codec of all forwards of a graph that is compiled around the model; None if the policy has none."""
        return None

    def call(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model under the policy, also where a compiler traces this call into a graph."""
        if not torch.compiler.is_compiling():
            if not self.is_entered():
                self.parts = frozenset()
            return super().call(module, run, *args, **kwargs)
        codec = self.traced_codec()
        if codec is None:
            return super().call(module, run, *args, **kwargs)
        with Interception(Stash(codec), self.rows):
            return run(*args, **kwargs)

    def call_part(self, part: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As above; parts that are called one after another are one forward, until one of them comes again."""
        if not torch.compiler.is_compiling() and torch.is_grad_enabled() and not self.is_entered():
            self.parts = (frozenset() if id(part) in self.parts else self.parts) | {id(part)}
        return super().call_part(part, run, *args, **kwargs)

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        recomputing = in_backward()
        goes_on = len(self.parts) > 1 and not recomputing
        stash = self.latest if goes_on and self.latest else Stash(self.codec(module), recomputing)
        if not recomputing:
            self.latest = stash
        RUNNING.stashes.append(stash)
        mode = Interception(stash, self.rows)
        enter_mode(mode)
        try:
            yield
        finally:
            mode.is_over = True
            stash.forget()

    def report(self) -> Summary:
        """Bytes of the latest training forward."""
        if self.latest is None:
            return Summary(self.name)
        return Summary(self.name, (), self.latest.raw_bytes, self.latest.kept_bytes, self.details())

    def details(self) -> tuple[str, ...]:
        """The lines of the policy's own in its report."""
        return ()


def traced_in() -> bool:
    """Whether the code that a compiler traces now is under a policy of the table."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return any(isinstance(mode, Interception) for mode in modes)


def form_now(x: Tensor, what: What) -> Form:
    """The form of ``x`` under the policy of the table in whose forward this thread is; exact without one. For autograd
    functions of other policies."""
    return RUNNING.stashes[-1].code(x, what) if RUNNING.stashes else exact_form(x)


def codec_now() -> Codec | None:
    """The codec of the policy of the table in whose forward this thread is. For operators of compiled graphs."""
    return RUNNING.stashes[-1].codec if RUNNING.stashes else None
