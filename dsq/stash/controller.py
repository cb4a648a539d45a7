"""The controller of a policy at work on one model: it is entered around the model's calls, reports, and can be removed.

call       run a call of the model, or of a part of it, under the policy
enter      the context of one forward; subclasses override it
suspend    run models as if they were under no policy
"""

import copyreg
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.nn.utils.parametrize import is_parametrized

from dsq.layers import not_compiled_alone

APPLIED = "_dsq_stash"  #: attribute of a model under policies: {policy name: controller}
_PART_OF = "_dsq_part_of"  #: attribute of a part of a model: the controllers of the model


@dataclass(frozen=True)
class PolicyStatus:
    """The work of a policy in the model's latest training forward; bytes are 0 before one."""

    policy: str
    attached: tuple[str, ...] = ()  #: names of the modules it changed; () for a policy that acts on the whole model
    raw_bytes: int = 0  #: of the tensors that came to be saved (unique storages)
    saved_bytes: int = 0  #: of what was saved for them
    details: tuple[str, ...] = ()  #: lines for a person: average bits, budgets

    def __str__(self) -> str:
        head = f"{self.policy}: {f'{len(self.attached)} modules' if self.attached else 'whole model'}"
        if self.raw_bytes:
            head += f", {self.raw_bytes / 2**20:.1f} MiB saved as {self.saved_bytes / 2**20:.1f} MiB"
        return "\n".join((head, *self.details))


@dataclass(eq=False)
class Controller:
    """A policy at work on one model, and on deep copies of the model (an EMA, say), which share the controller.

    Policies subclass it: ``enter`` is the context of a forward. state_dict() holds all that a resumed run needs to
    equal an unbroken one (estimates, caches, seeds).
    """

    by_parts: ClassVar[bool] = False  #: whether it acts on parts of the model that are called by themselves

    model: nn.Module
    name: str = ""  # set by apply
    compiles: bool = False  #: whether the model, or blocks of it, may be compiled; set by apply
    attached: tuple[str, ...] = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def enter(self, module: nn.Module) -> AbstractContextManager[Any]:
        """Return the context of a forward of ``module`` (the model or a copy of it), or of a checkpoint's
        recomputation of a part of one."""
        return nullcontext()

    def enter_graph(self, module: nn.Module) -> None:
        """Note that a compiler traces a call of ``module`` (the model or a copy of it) into a graph, in which the
        policy does nothing. Raise RuntimeError if it does not go with that."""
        raise RuntimeError(COMPILE_BEFORE)

    def call(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model, or a part of it, under the policy; ``run`` is the call without it. Calls inside enter once.

        Parts that are called one after another are one forward, until one of them comes again: a trainer may call the
        layers, then the head with the loss, and both read one tensor, which is saved once. RuntimeError where the
        model, or a block of it, was compiled and the policy does not go with that, and under torch.func.
        """
        is_part = applied(module).get(self.name) is not self
        if torch.compiler.is_compiling():
            if not is_part:
                self.enter_graph(module)
            return run(*args, **kwargs)
        if not torch.is_grad_enabled() or RUNNING.suspended or self in RUNNING.entered:
            return run(*args, **kwargs)
        skipped = get_eval_frame_callback() is not None
        if is_part:
            parts = RUNNING.parts.get(self, frozenset())
            RUNNING.parts[self] = (frozenset() if id(module) in parts else parts) | {id(module)}
        elif not self.compiles and (skipped or next(compiled_blocks(module), None) is not None):
            raise RuntimeError(COMPILE_BEFORE)
        else:
            RUNNING.parts.pop(self, None)
        # a compiler that skipped this frame (its recompile limit, a stance) would try each frame inside
        enter = torch.compiler.disable(self.run_forward) if skipped else self.run_forward
        return enter(module, run, *args, **kwargs)

    def run_forward(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call ``run`` in the context that ``enter`` returns. RuntimeError under torch.func."""
        if torch._C._functorch.peek_interpreter_stack() is not None:
            text = "stash policies do not go with torch.func: call backward(), or take them away"
            raise RuntimeError(f"{text} (dsq.unconvert(model), controller.remove())")
        return run_under(((self, module),), run, *args, **kwargs)

    def level(self, module: nn.Module) -> str:
        """Return what a rise of the level of ``module`` (the model or a copy of it) changes: a checkpoint must be
        recomputed at the level of its forward."""
        return ""

    def report(self) -> PolicyStatus:
        """Return the latest training forward in numbers."""
        return PolicyStatus(self.name, self.attached)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the policy between steps: tensors and plain values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave; ValueError names missing or unexpected keys."""
        got, expected = sorted(state) if isinstance(state, Mapping) else repr(state), sorted(self.state_dict())
        if got != expected:
            raise ValueError(f"state of policy {self.name!r} must have the keys {expected}, got {got}")
        self.take(state)

    def take(self, state: Mapping[str, Any]) -> None:
        """Take back what ``state_dict`` gave, whose keys ``state`` has."""

    def restore(self, module: nn.Module) -> None:
        """Take back what the policy changed of this module of the model, or of a copy of it, hooks aside."""

    def remove(self, copy: nn.Module | None = None) -> None:
        """Restore the model exactly: classes, attributes, hooks. A second call does nothing.

        copy: a deep copy of the model, made under the policy, to be restored instead: the two share this controller.
        """
        target = self.model if copy is None else copy
        if applied(target).get(self.name) is not self:
            return
        hooks = target._forward_pre_hooks
        for number, hook in list(hooks.items()):
            if isinstance(hook, partial) and hook.func is _check_entered and hook.args == (self,):
                del hooks[number]
        for module in list(target.modules()):
            _release(module, self)
            self.restore(module)


class Running(threading.local):
    """The policies and stashes that this thread is in; nn.DataParallel has a thread a replica."""

    #: number of contexts in which models run as if they were under no policy; of all threads, as autograd recomputes a
    #: checkpoint's segment in a thread of its own for a GPU
    suspended: ClassVar[int] = 0

    def __init__(self) -> None:
        self.entered: dict[Controller, nn.Module] = {}  #: policies and the models whose forwards they are in
        self.stashes: list[Any] = []  #: those of the policies with rules
        #: ids of the parts of a policy's model that were called by themselves, one after another
        self.parts = WeakKeyDictionary[Controller, frozenset[int]]()
        #: the stash of a policy's latest training forward, and the level at which it began
        self.latest = WeakKeyDictionary[Controller, tuple[Any, str]]()


RUNNING = Running()

COMPILE_BEFORE = (
    "this stash policy does not work inside torch.compile: use an eager model, or dsq.DynamicPrecision(model) or bfp "
    "and then dsq.compile(model)"
)


def compiled_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the compiled modules of a model, itself perhaps, but for those inside of others.

    They are found by name, as importing torch._dynamo to ask takes a second.
    """
    unvisited: list[nn.Module | None] = [model]
    while unvisited:  # before each forward: children() also reads their names
        module = unvisited.pop()
        if module is None:
            continue
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            yield module
        else:
            unvisited.extend(module._modules.values())


def run_under(
    entering: Sequence[tuple[Controller, nn.Module]], run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``run`` under the policies, those that are not entered yet, and note them for the checkpoints that are
    called inside. A checkpoint enters those of its forward around its recomputation."""
    new_policies = {policy: module for policy, module in entering if policy not in RUNNING.entered}
    try:
        with ExitStack() as stack:
            for policy, module in new_policies.items():
                stack.callback(RUNNING.entered.pop, policy, None)
                RUNNING.entered[policy] = module
                stack.enter_context(policy.enter(module))
            return run(*args, **kwargs)
    finally:  # Ctrl-C may come between the block and its exit
        for policy in new_policies:
            RUNNING.entered.pop(policy, None)


# ---- calls of a model go through its policies


def applied(model: nn.Module) -> dict[str, Controller]:
    """Return the policies applied to this very module, name to controller."""
    controllers: dict[str, Controller] = model.__dict__.get(APPLIED, {})
    return controllers


def acting_on(module: nn.Module) -> tuple[Controller, ...]:
    """Return the policies that act on calls of this module: those applied to it, and to models of which it is a
    part."""
    return (*applied(module).values(), *module.__dict__.get(_PART_OF, ()))


def intercept(controller: Controller, model: nn.Module) -> None:
    """Let calls of ``model`` go through ``controller.call``, until the controller is removed, and calls of its parts,
    which a loss in chunks or a method of the model makes.

    The class of each module is set to a subclass of it whose ``__call__`` does. Python looks ``__call__`` up in the
    class, not in the instance, and hooks cannot wrap a call in a context that an exception also leaves. Copies of the
    module, and replicas of nn.DataParallel, have the same class.
    """
    model.register_forward_pre_hook(partial(_check_entered, controller), prepend=True)
    model.__dict__[APPLIED] = applied(model) | {controller.name: controller}
    for module in (model, *_parts(model)) if controller.by_parts else (model,):
        if module is not model:
            module.__dict__.setdefault(_PART_OF, []).append(controller)
        cls = type(module)
        if not hasattr(cls, "_dsq_original"):
            object.__setattr__(module, "__class__", _intercepted(cls))  # a compiled module passes what is set on


def _check_entered(controller: Controller, model: nn.Module, args: Any) -> None:
    """Raise RuntimeError if a compiler, given the model before the policy came, calls it past ``controller.call``."""
    if torch.compiler.is_compiling():
        controller.enter_graph(model)
    elif controller not in RUNNING.entered and not RUNNING.suspended and torch.is_grad_enabled():
        raise RuntimeError(COMPILE_BEFORE)


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the children of the model that are made of modules themselves, also of those in lists and dicts.

    Where such a child wraps a single module, that comes too: PEFT's ``merge_and_unload`` returns it.
    """
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        elif is_parametrized(child):  # a layer, whose one child makes its weight
            continue
        elif next(child.children(), None) is not None and not isinstance(child, nn.MultiheadAttention):
            yield child
            inner = list(child.children())
            if len(inner) == 1 and not isinstance(inner[0], (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
                yield from _parts(child)


def _release(module: nn.Module, controller: Controller) -> None:
    controllers, of_models = applied(module), module.__dict__.get(_PART_OF, [])
    if controllers.get(controller.name) is controller:
        del controllers[controller.name]
    of_models[:] = [other for other in of_models if other is not controller]
    if controllers or of_models:
        return
    for name in (APPLIED, _PART_OF):
        module.__dict__.pop(name, None)
    if "_dsq_original" in vars(type(module)):  # else FSDP made a class of ours, which does nothing now
        object.__setattr__(module, "__class__", vars(type(module))["_dsq_original"])


def _intercepted(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of ``cls`` whose calls go through policies; one, as a compiled graph serves one class."""
    for subclass in cls.__subclasses__():
        if "_dsq_original" in vars(subclass):
            return subclass

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return under_policies(self, partial(cls.__call__, self), *args, **kwargs)

    names = {"__call__": call, "_dsq_original": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
    names["__reduce__"] = object.__reduce__  # that of a converted class would copy a model without its policies
    kind: Any = _Unpicklable if type(cls) is type else type(cls)
    return kind(cls.__name__, (cls,), names)  # type: ignore[no-any-return]


@not_compiled_alone  # of a model whose call the compiler gave back, it would compile this call
def under_policies(model: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``run``, a part of ``model`` that is not its forward, under the policies applied to it."""
    for policy in acting_on(model):
        run = partial(policy.call, model, run)
    return run(*args, **kwargs)


class _Unpicklable(type):
    """The type of classes that are made here: pickle asks for one and gets the refusal of a model under a policy."""


def _refuse_pickle(_: type) -> NoReturn:
    text = "a model under a stash policy cannot be pickled: save its state_dict(), or, where training goes on, "
    raise TypeError(text + "dsq.unconvert(copy.deepcopy(model)); policies applied by hand need remove() first")


copyreg.pickle(_Unpicklable, _refuse_pickle)


@contextmanager
def suspend() -> Iterator[None]:
    """Run models inside as if they were under no stash policy.

    Segments of the policy "checkpoint" go on being recomputed, which changes no number. Compiled blocks are called
    eagerly by whoever needs it (``dsq.stash.policy.run_eagerly``).
    """
    Running.suspended += 1
    try:
        yield
    finally:
        Running.suspended -= 1
