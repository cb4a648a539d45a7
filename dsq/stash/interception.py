"""How bfp, mesa, gact and selective see a model's operations: a function mode, entered around each call of the model.

The mode looks each function up in the table (dsq/stash/rules): a rule runs in its stead, all else runs as it is. In
graphs of torch.compile it does nothing: a partitioner packs there (dsq/stash/graphs/compiled.py).
"""

import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from dsq.layers import not_compiled_alone
from dsq.ops.torch_checkpoint import (
    in_backward,
    innermost_hooks,
    is_open,
    is_wrapped,
    recompute_under,
    refuse_other_level,
    segment_now,
)
from dsq.quantizers import Quantized
from dsq.stash.controller import RUNNING, Controller, PolicyStatus, run_under
from dsq.stash.rules import ALSO_WITHOUT_GRADIENT, RULES, Rule
from dsq.stash.saved_forms import NO_CODEC, Codec
from dsq.stash.segment_inputs import code_inputs, inputs_of, set_inputs
from dsq.stash.stash import Stash

_TENSORS = (Tensor, nn.Parameter)


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

#: methods that PyTorch wrote in Python, whose own calls no mode sees
_OF_PYTHON = {Tensor.__pow__: torch.pow, Tensor.__rsub__: torch.rsub, Tensor.norm: torch.norm}

_COLLECTIVES = sys.modules.get("torch.distributed.distributed_c10d")  # which import torch brings, where it is built in
#: what gives memory away to be written past the version counter, or writes so itself: a collective
_EXPOSES_MEMORY = {
    *(Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__),  # type: ignore[attr-defined]
    *(getattr(_COLLECTIVES, name) for name in getattr(_COLLECTIVES, "__all__", ())),
}

multi_head_attention_forward = _own_body(cast(FunctionType, F.multi_head_attention_forward))


class Interception(TorchFunctionMode):
    """The rules in place of the functions, for one forward."""

    def __init__(
        self, stash: Stash, rules: Mapping[Callable[..., Any], Rule], policy: "RulePolicy", level: str
    ) -> None:
        super().__init__()
        self.stash, self.rules, self.policy, self.level = stash, rules, policy, level
        self.entered: tuple[tuple[Controller, nn.Module], ...] = ()  #: policies; () before a checkpoint
        #: each policy's level; filled in again when the forward ends, as "auto" may be decided in it
        self.levels: list[str] = []
        self.segments: list[tuple[Any, list[Any]]] = []  #: of checkpoints that run, outer first, and their inputs
        #: the segment that this forward, of a part, lies in
        self.outer_segment = None if innermost_hooks() is None else segment_now()

    @not_compiled_alone
    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.unflatten:  # a Python function that a compiler does not trace under a mode
            func = torch.unflatten
        if torch.compiler.is_compiling():
            note_graph(self.policy, self.level)  # a guard on the level, so that a rise compiles once more
            return func(*args, **kwargs)
        if func is F.multi_head_attention_forward:  # one call to a mode: its body makes calls with rules
            with self:
                return multi_head_attention_forward(*args, **kwargs)
        func = _OF_PYTHON.get(func, func)
        rule = self.rules.get(func)
        if rule is None and func in _EXPOSES_MEMORY:
            for x in tree_leaves((args, kwargs)):
                if type(x) in _TENSORS:
                    self.stash.never_cache(x)
        if func in _CHOOSE:
            self._follow_checkpoint()
            for segment, inputs in self.segments:
                set_inputs(segment, inputs)
        if rule is None or not torch.is_grad_enabled() or kwargs.get("out") is not None:
            return func(*args, **kwargs)
        kwargs.pop("out", None)  # which F.normalize always names
        needs_gradient = func in ALSO_WITHOUT_GRADIENT
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                dense = type(value) in _TENSORS and value.layout is torch.strided  # a DTensor has operations of its own
                if not dense or value.is_complex():
                    return func(*args, **kwargs)
                needs_gradient = needs_gradient or value.requires_grad
        if not needs_gradient:
            return func(*args, **kwargs)
        self._follow_checkpoint()
        return rule(self.stash, *args, **kwargs)

    def _follow_checkpoint(self) -> None:
        """Let a segment of torch.utils.checkpoint be recomputed under the policies that it runs under now."""
        if innermost_hooks() is None and self.stash.segment is None:
            return
        segment = segment_now()
        if segment is self.stash.segment:
            return
        self.segments = [(other, inputs) for other, inputs in self.segments if is_open(other)]
        if segment is not None and not is_wrapped(segment, recompute_at_level):
            self.stash.enter_segment(None)
            if not self.entered:
                self.entered = tuple(RUNNING.entered.items())
                self.levels += levels_now(self.entered)
            recompute_under(segment, recompute_at_level, self.entered, self.levels, segment is not self.outer_segment)
            inputs = inputs_of(segment)
            if code_inputs(segment, lambda x: self.stash.code(x, "boundary")):
                self.segments.append((segment, inputs))
        self.stash.enter_segment(segment)


def levels_now(entered: Iterable[tuple[Controller, nn.Module]]) -> list[str]:
    """Return the level of each policy's model."""
    return [policy.level(module) for policy, module in entered]


def recompute_at_level(
    entered: tuple[tuple[Controller, nn.Module], ...],
    levels: list[str],
    enters: bool,
    run: Callable[..., Any],
    *args: Any,
) -> Any:
    """Recompute a segment of a checkpoint under the policies of its forward; RuntimeError at another level.

    ``enters``: whether the policies were entered around the segment, and not in it by each part that it calls.
    """
    refuse_other_level(levels_now(entered), levels)
    return run_under(entered if enters else (), run, *args)


def note_graph(policy: "RulePolicy", level: str) -> None:
    """Warn, once for a policy, of a graph that a compiler traces without a partitioner of dsq, or that breaks at the
    products of a level with random numbers."""
    layer = policy.layer(policy.model)
    if layer is not None and layer.quantizers.draws and not _may_draw():
        if not policy.has_broken_graph:
            text = "random numbers break the graphs, and products run in eager mode: compile with fullgraph=True"
            warnings.warn(text, stacklevel=2)
        policy.has_broken_graph = True
    elif not policy.has_exact_graph and not has_partitioner():
        policy.has_exact_graph = True
        text = "compiled graphs save their tensors exact: call dsq.compile(model) in place of torch.compile(model), or "
        warnings.warn(f"{text}torch.compile(model, options=dsq.inductor_options(model))", stacklevel=2)


# torch.compiler.assume_constant_result without its import: a compiler calls the function while it traces
note_graph._dynamo_marked_constant = True  # type: ignore[attr-defined]


def has_partitioner() -> bool:
    """Return whether the backend of the graph that a compiler traces now was given a partitioner, or is unknown, as
    that of torch.export."""
    tracer = _tracer()
    if tracer is None:
        return True
    backend = tracer.output.compiler_fn
    options = getattr(backend, "config", None)  # Inductor's
    if options is None:
        options = getattr(backend, "kwargs", {"options": {"custom_partitioner_fn": None}}).get("options") or {}
    return "custom_partitioner_fn" in options


def _may_draw() -> bool:
    """Return whether the graph that a compiler traces now, if it is known, may have numbers that a generator drew."""
    tracer = _tracer()
    return tracer is None or bool(tracer.output.shape_env.allow_scalar_outputs)


def _tracer() -> Any:
    """Return the compiler that traces now; None without one."""
    dynamo: Any = sys.modules.get("torch._dynamo.symbolic_convert")
    return getattr(getattr(dynamo, "tls", None), "current_tx", None)


class RulePolicy(Controller):
    """A policy that codes what the table lets it. Subclasses give the codec of a forward."""

    by_parts = True
    latest: Stash | None = None  #: of the latest training forward
    forwards = 0  #: training forwards so far, outside of compiled graphs
    rules: Mapping[Callable[..., Any], Rule] = RULES  #: of the operations that it acts on
    has_exact_graph = False  #: a graph of the model was compiled without a partitioner
    has_broken_graph = False  #: one broke at its products

    def codec(self, module: nn.Module) -> Codec:
        """Return the codec of the forward that begins."""
        return NO_CODEC

    @contextmanager
    def enter(self, module: nn.Module) -> Iterator[None]:
        recomputing, level = in_backward(), self.level(module)
        # parts that a segment of a checkpoint calls share nothing: its recomputation calls one after another too
        goes_on = len(RUNNING.parts.get(self, ())) > 1 and not recomputing and segment_now() is None
        latest, latest_level = RUNNING.latest.get(self, (None, "")) if goes_on else (None, "")
        stash = Stash(self.codec(module)) if latest is None or level != latest_level else latest
        if not recomputing:
            self.latest = stash
            self.forwards += 1
            RUNNING.latest[self] = stash, level
        RUNNING.stashes.append(stash)
        mode = Interception(stash, self.rules, self, level)
        try:
            with mode:
                yield
        finally:
            mode.levels[:] = levels_now(mode.entered)
            RUNNING.stashes.pop()
            stash.end_forward()

    def level(self, module: nn.Module) -> str:
        layer = self.layer(module)
        return "" if layer is None else layer.quantizers_text

    def layer(self, module: nn.Module) -> Quantized | None:
        """Return a converted layer of ``module`` (the model, a copy or a part of it), else one of the model."""
        for root in (module,) if module is self.model else (module, self.model):
            for layer in root.modules():
                if isinstance(layer, Quantized):
                    return layer
        return None

    def report(self) -> PolicyStatus:
        raw, saved = (self.latest.bytes.raw, self.latest.bytes.saved) if self.latest else (0, 0)
        return PolicyStatus(self.name, (), raw, saved, self.details())

    def details(self) -> tuple[str, ...]:
        """Return the lines of the policy's own in its report."""
        return ()


def stash_now() -> Stash:
    """Return the stash of the policy of the table in whose forward this thread is; one that codes nothing without one.
    For autograd functions of other policies."""
    return RUNNING.stashes[-1] if RUNNING.stashes else Stash(NO_CODEC)
