"""What a policy hands back: the controller of one model. It is entered around the model's calls, reports, and can take
everything back.
"""

import copyreg
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

APPLIED = "_dsq_stash"  #: attribute of a model under policies: {policy name: controller}
_PART_OF = "_dsq_part_of"  #: attribute of a part of a model: the controllers of the model


@dataclass(frozen=True)
class Summary:
    """What a policy did in the model's latest training forward.

    raw_bytes: bytes of the tensors that came to be saved (unique storages); kept_bytes: bytes kept for them; both 0
    before a forward. details: the policy's own table, a line each (bits per tensor, budgets, warnings); plain text,
    for a person.
    """

    policy: str
    attached: tuple[str, ...] = ()  #: names of the modules it changed; () for a policy that acts on the whole model
    raw_bytes: int = 0
    kept_bytes: int = 0
    details: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = f"{self.policy}: {f'{len(self.attached)} modules' if self.attached else 'whole model'}"
        if self.raw_bytes:
            head += f", {self.raw_bytes / 2**20:.1f} MiB kept as {self.kept_bytes / 2**20:.1f} MiB"
        return "\n".join((head, *self.details))


class SharedByCopies:
    """What a deep copy of the model (an EMA, say) shares with it, and what makes the model refuse to be pickled."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a model under a stash policy cannot be pickled: save its state_dict(), or call remove() on the policy's "
            "controller first"
        )


class Removable(Protocol):
    """A handle of a hook."""

    def remove(self) -> None: ...


class Swapped:
    """A module whose class a policy set to a subclass of ``plain``, its own."""

    plain: ClassVar[type[nn.Module]]


@dataclass(eq=False)
class Controller(SharedByCopies):
    """A policy at work on one model. Policies subclass it to say what is entered around a forward, and what they keep
    between steps.

    state_dict() holds all that a resumed run needs to equal an unbroken one (estimates, caches, seeds).
    """

    by_parts: ClassVar[bool] = False  #: whether it acts on parts of the model that are called by themselves

    model: nn.Module
    name: str = ""  # set by apply
    attached: tuple[str, ...] = ()
    hooks: list[Removable] = field(default_factory=list, repr=False)  #: which remove() takes away

    def around(self, module: nn.Module) -> AbstractContextManager[Any]:
        """What is entered around a forward of ``module`` (the model or a copy of it), and around a checkpoint's
        recomputation of a part of one. ``enter_mode`` turns on a function mode for it."""
        return nullcontext()

    def call(self, module: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model under the policy; ``run`` is the call without it. Nested calls of one model enter once. What a
        compiler traces is left to policy.py's hook."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or self.is_entered():
            return run(*args, **kwargs)
        return run_under(((self, module),), run, *args, **kwargs)

    def call_part(self, part: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a part of the model under the policy; inside of the model's forward, as it is."""
        return Controller.call(self, self.model, run, *args, **kwargs)

    def is_entered(self) -> bool:
        """Whether this thread is inside of a forward under the policy."""
        return self in RUNNING.entered

    def report(self) -> Summary:
        """The latest training forward in numbers."""
        return Summary(self.name, self.attached)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; {} where the policy keeps nothing between steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave; ValueError names missing or unexpected keys."""
        check_keys(self.name, state, ())

    def restore(self, module: nn.Module) -> None:
        """Take back what the policy changed of this module of the model, or of a copy of it, hooks aside."""

    def remove(self, copy: nn.Module | None = None) -> None:
        """Restore the model exactly: classes, attributes, hooks. A second call does nothing.

        copy: a deep copy of the model, made under the policy, to be restored instead: the two share this controller.
            ValueError where it is none, or was restored before.
        """
        target = self.model if copy is None else copy
        if applied(target).get(self.name) is not self:
            if target is self.model:
                return
            raise ValueError(f"copy must be a deep copy of the model, made under its policy {self.name!r}")
        for hook in self.hooks:
            self._remove_hook(target, hook)
        for module in list(target.modules()):
            _release(module, self)
            self.restore(module)

    def _remove_hook(self, model: nn.Module, hook: Removable) -> None:
        if model is self.model:
            hook.remove()
        elif isinstance(hook, Controller):
            hook.remove(model)
        else:  # a copy's hook has the number of the model's
            dicts = (hooks for m in model.modules() for name, hooks in vars(m).items() if "_hooks" in name and hooks)
            for hooks in dicts:
                hooks.pop(getattr(hook, "id", None), None)


class Running(threading.local):
    """Per thread (nn.DataParallel): the policies in whose forward it is, outermost first, and whose forward; and the
    stashes of those of the table."""

    def __init__(self) -> None:
        self.entered: dict[Controller, nn.Module] = {}
        self.stashes: list[Any] = []

    def depths(self) -> tuple[int, int, int]:
        """How many policies are entered, stashes made, and function modes on."""
        return len(self.entered), len(self.stashes), torch._C._len_torch_function_stack()

    def leave(self, depths: tuple[int, int, int]) -> None:
        """Leave what came since ``depths``."""
        entered, stashes, modes = depths
        while len(self.entered) > entered:
            self.entered.popitem()
        del self.stashes[stashes:]
        while torch._C._len_torch_function_stack() > modes:
            torch._C._pop_torch_function_stack()


RUNNING = Running()


def run_under(
    entering: Sequence[tuple[Controller, nn.Module]], run: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``run`` under the policies, those that are not entered yet, and note them for the checkpoints that are
    called inside. A checkpoint enters those of its forward around its recomputation.

    What ``around`` enters is left here, by count: Ctrl-C may interrupt a context manager's own lines.
    """
    before = RUNNING.depths()
    try:
        with ExitStack() as stack:
            for policy, module in entering:
                if not policy.is_entered():
                    RUNNING.entered[policy] = module
                    stack.enter_context(policy.around(module))
            return run(*args, **kwargs)
    finally:
        try:
            RUNNING.leave(before)
        except KeyboardInterrupt:
            RUNNING.leave(before)
            raise


def enter_mode(mode: TorchFunctionMode) -> None:
    """Turn ``mode`` on until the call that ``run_under`` makes is over."""
    torch._C._push_on_torch_function_stack(mode)


def entered_now() -> tuple[tuple[Controller, nn.Module], ...]:
    """The policies in whose forward this thread is, and the models."""
    return tuple(RUNNING.entered.items())


def check_keys(name: str, state: Mapping[str, Any], expected: tuple[str, ...]) -> None:
    """ValueError when a policy's state has missing or unexpected keys, or is no mapping."""
    got = sorted(state) if isinstance(state, Mapping) else repr(state)
    if got != sorted(expected):
        raise ValueError(f"state of policy {name!r} must have the keys {sorted(expected)}, got {got}")


def parameter_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """What a policy's state keeps to tell its model from another."""
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def check_parameters(policy: str, model: nn.Module, saved: Mapping[str, tuple[int, ...]]) -> None:
    """ValueError where a policy's state is of a model with other parameters than this one."""
    if not isinstance(saved, Mapping):
        raise ValueError(f"state of policy {policy!r} must have the shapes of the parameters, got {saved!r}")
    ours = parameter_shapes(model)
    for name in ours | dict(saved):
        here, there = ours.get(name, "none"), saved.get(name, "none")
        if here != there:
            raise ValueError(
                f"state of policy {policy!r} must be this model's, whose {name} is {here}; the state's is {there}"
            )


# ---- calls of a model go through its policies


def applied(model: nn.Module) -> dict[str, Controller]:
    """The policies applied to this very module (not to its children), name to controller, the first applied first."""
    here: dict[str, Controller] = model.__dict__.get(APPLIED, {})
    return here


def intercept(controller: Controller, model: nn.Module) -> None:
    """Let calls of ``model`` go through ``controller.call``, until the controller is removed.

    Calls of its parts, which a loss in chunks or a method of the model makes, go through ``controller.call_part``.

    The classes are set to subclasses of themselves whose ``__call__`` does. Copies and replicas carry it.
    """
    model.__dict__.setdefault(APPLIED, {})[controller.name] = controller
    for module in (model, *_parts(model)) if controller.by_parts else (model,):
        if module is not model:
            module.__dict__.setdefault(_PART_OF, []).append(controller)
        own = type(module)
        if not hasattr(own, "_dsq_plain"):
            object.__setattr__(module, "__class__", _intercepted(own))  # a compiled module passes what is set on


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    """The children of the model that are made of modules themselves, as its blocks; those in lists and dicts too."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _parts(child)
        elif next(child.children(), None) is not None and not isinstance(child, nn.MultiheadAttention):
            yield child


def _release(module: nn.Module, controller: Controller) -> None:
    if APPLIED not in module.__dict__ and _PART_OF not in module.__dict__:
        return
    here, around = applied(module), module.__dict__.get(_PART_OF, [])
    if here.get(controller.name) is controller:
        del here[controller.name]
    if controller in around:
        around.remove(controller)
    if here or around:
        return
    for name in (APPLIED, _PART_OF):
        module.__dict__.pop(name, None)
    if "_dsq_plain" in vars(type(module)):  # else FSDP made a class of ours, which does nothing now
        object.__setattr__(module, "__class__", vars(type(module))["_dsq_plain"])


def _intercepted(own: type[nn.Module]) -> type[nn.Module]:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return under_policies(self, partial(own.__call__, self), *args, **kwargs)

    names = {"__call__": call, "_dsq_plain": own, "__module__": own.__module__, "__qualname__": own.__qualname__}
    kind: Any = _Unpicklable if type(own) is type else type(own)
    return kind(own.__name__, (own,), names)  # type: ignore[no-any-return]


def under_policies(model: nn.Module, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``run``, a part of ``model`` that is not its forward, under the policies applied to it."""
    for policy in applied(model).values():
        run = partial(policy.call, model, run)
    for policy in model.__dict__.get(_PART_OF, ()):
        run = partial(policy.call_part, model, run)
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
    before = RUNNING.depths()
    swapped = [(module, type(module)) for module in model.modules() if isinstance(module, Swapped)]
    try:
        for owner in model.modules():
            for controller in applied(owner).values():
                RUNNING.entered.setdefault(controller, owner)
        for module, _ in swapped:
            object.__setattr__(module, "__class__", module.plain)
        yield
    finally:
        RUNNING.leave(before)
        for module, kind in swapped:
            module.__class__ = kind
