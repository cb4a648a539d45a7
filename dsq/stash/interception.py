"""The one place where a policy sees a model's operations: a function mode, entered around each call of the model.

The model's class is set to a subclass of itself whose ``__call__`` enters the mode; copies and replicas of the model
carry it. The mode looks each function up in the table (dsq/stash/table): a row runs in its stead, all else runs as it
is. torch.compile traces the mode into the graphs of a model, or of blocks, that were compiled before.
"""

import copyreg
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
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
from dsq.stash.codes import BOUNDARY, Codec, Form, Kept, Stash, exact_form
from dsq.stash.controller import APPLIED, Controller, SharedByCopies, Summary
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


multi_head_attention_forward = _own_body(cast(FunctionType, F.multi_head_attention_forward))


class Interception(TorchFunctionMode):
    """The rows of the table in place of the functions, for one forward."""

    def __init__(self, stash: Stash, rows: Mapping[Callable[..., Any], Row] = TABLE) -> None:
        super().__init__()
        self.stash, self.rows = stash, rows

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
        row = self.rows.get(func)
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
            if segment is not None and not isinstance(segment.recompute_fn, _UnderPolicies):
                self.stash.enter_segment(None)
                segment.recompute_fn = _UnderPolicies(segment.recompute_fn, entered_now())
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
            x = argument.unpack() if isinstance(argument, SavedTensor) else None
            if x is not None and rank is None:
                rank = x.dim()
            if x is not None and x.grad_fn is not None and x.dim() == rank:
                kept.append((stash.code(x, BOUNDARY), x.requires_grad))
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
    entered: "tuple[tuple[ForwardPolicy, nn.Module], ...]"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with again(self.entered):
            return self.run(*args, **kwargs)


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


class ForwardPolicy(Controller):
    """A policy that acts while a model's forward runs. Subclasses say what is entered around it."""

    intercepts = False  #: whether it does: ``intercept`` was called

    def around(self, module: nn.Module) -> AbstractContextManager[Any]:
        """What is entered around a forward of ``module`` (the model or a copy of it), and around a checkpoint's
        recomputation of a part of one."""
        raise NotImplementedError

    def call(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model under the policy; ``run`` is the call without it. Nested calls of one model enter once."""
        if not torch.is_grad_enabled() or self.is_entered():
            return run(*args, **kwargs)
        with again(((self, module),)):
            return run(*args, **kwargs)

    def is_entered(self) -> bool:
        """Whether this thread is inside of a forward under the policy."""
        return self in [policy for policy, _ in _RUNNING.entered]


class TablePolicy(ForwardPolicy):
    """A policy that codes what the table lets it. Subclasses give the codec of a forward."""

    latest: Stash | None = None  #: of the latest training forward
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
            return super().call(module, run, *args, **kwargs)
        codec = self.traced_codec()
        if codec is None:
            return run(*args, **kwargs)  # which policy.py's hook refuses
        with Interception(Stash(codec), self.rows):
            return run(*args, **kwargs)

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        recomputing = in_backward()
        stash = Stash(self.codec(module), recomputing)
        if not recomputing:
            self.latest = stash
        _RUNNING.stashes.append(stash)
        try:
            with Interception(stash, self.rows):
                yield
        finally:
            _RUNNING.stashes.pop()
            stash.forget()

    def report(self) -> Summary:
        """Bytes of the latest training forward."""
        if self.latest is None:
            return Summary(self.name)
        return Summary(self.name, (), self.latest.raw_bytes, self.latest.kept_bytes, self.details())

    def details(self) -> tuple[str, ...]:
        """The lines of the policy's own in its report."""
        return ()


class _Running(threading.local):
    """Per thread (nn.DataParallel): the policies in whose forward it is, outermost first, and whose forward."""

    def __init__(self) -> None:
        self.entered: list[tuple[ForwardPolicy, nn.Module]] = []
        self.stashes: list[Stash] = []


_RUNNING = _Running()


@contextmanager
def again(entering: Sequence[tuple[ForwardPolicy, nn.Module]]) -> Iterator[None]:
    """Enter the policies, those that are not entered yet, and note them for the checkpoints that are called inside. A
    checkpoint enters those of its forward around its recomputation."""
    before = len(_RUNNING.entered)
    with ExitStack() as stack:
        try:
            for policy, module in entering:
                if not policy.is_entered():
                    _RUNNING.entered.append((policy, module))
                    stack.enter_context(policy.around(module))
            yield
        finally:
            del _RUNNING.entered[before:]


def traced_in() -> bool:
    """Whether the code that a compiler traces now is under a policy of the table."""
    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return any(isinstance(mode, Interception) for mode in modes)


def entered_now() -> tuple[tuple[ForwardPolicy, nn.Module], ...]:
    """The policies in whose forward this thread is, and the models."""
    return tuple(_RUNNING.entered)


def form_now(x: Tensor, word: Kept) -> Form:
    """The form of ``x`` under the policy of the table in whose forward this thread is; exact without one. For autograd
    functions of other policies."""
    return _RUNNING.stashes[-1].code(x, word) if _RUNNING.stashes else exact_form(x)


def codec_now() -> Codec | None:
    """The codec of the policy of the table in whose forward this thread is. For operators of compiled graphs."""
    return _RUNNING.stashes[-1].codec if _RUNNING.stashes else None


def intercept(controller: ForwardPolicy, model: nn.Module) -> None:
    """Let calls of ``model`` go through ``controller.call``, until the controller is removed."""
    own = type(model)
    controller.intercepts = True
    controller.undo.append((_restore_class, (model, controller)))
    if not hasattr(own, "_dsq_plain"):
        object.__setattr__(model, "__class__", _intercepted(own))  # a compiled module passes what is set on


def _restore_class(model: nn.Module, controller: ForwardPolicy) -> None:
    others = [p for p in forward_policies(model) if p is not controller]
    if not others and "_dsq_plain" in vars(type(model)):  # else FSDP made a class of ours, which does nothing now
        object.__setattr__(model, "__class__", vars(type(model))["_dsq_plain"])


def forward_policies(model: nn.Module) -> list[ForwardPolicy]:
    """Those applied to the model, the first applied first."""
    policies = model.__dict__.get(APPLIED, {}).values()
    return [policy for policy in policies if isinstance(policy, ForwardPolicy) and policy.intercepts]


def _intercepted(own: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return under_policies(self, partial(own.__call__, self), *args, **kwargs)

    names = {"__call__": call, "_dsq_plain": own, "__module__": own.__module__, "__qualname__": own.__qualname__}
    kind: Any = _Unpicklable if type(own) is type else type(own)
    return kind(own.__name__, (own,), names)  # type: ignore[no-any-return]


def under_policies(model: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``run``, a part of ``model`` that is not its forward, under the policies applied to it."""
    for policy in forward_policies(model):
        run = partial(policy.call, model, run)
    return run(*args, **kwargs)


class _Unpicklable(type):
    """The type of classes that are made here: pickle asks for one and gets the refusal of a model under a policy."""


copyreg.pickle(_Unpicklable, lambda _: SharedByCopies().__reduce__())


@contextmanager
def suspended(model: nn.Module) -> Iterator[None]:
    """Run the forward of ``model`` inside as if no stash policy were applied to it or to a module in it.

    Segments of the policy "checkpoint" go on being recomputed, which changes no number. Compiled blocks are called
    eagerly by whoever needs it (``dsq.stash.policy.run_eagerly``).
    """
    noted = [(policy, module) for module in model.modules() for policy in forward_policies(module)]
    swapped: list[tuple[nn.Module, type[nn.Module]]] = []
    for owner in model.modules():
        for controller in owner.__dict__.get(APPLIED, {}).values():
            twins = dict(zip(controller.model.modules(), owner.modules(), strict=False))  # owner may be a deep copy
            swapped += [(twins.get(module, module), kind) for module, kind in controller.swapped]
    classes = [(module, type(module)) for module, _ in swapped]
    for module, kind in swapped:
        module.__class__ = kind
    _RUNNING.entered.extend(noted)
    try:
        yield
    finally:
        del _RUNNING.entered[len(_RUNNING.entered) - len(noted) :]
        for module, kind in classes:
            module.__class__ = kind
