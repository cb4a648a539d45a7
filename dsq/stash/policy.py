"""What every stash policy is: a registered function that attaches to a model and hands back a controller.

    @register("bfp", composes_with=("selective", "wtacrs", "checkpoint"))
    def attach(model: nn.Module, *, bits: int = 4, rounding: str = "nearest") -> Controller: ...

A policy is a folder of dsq/stash/ (all of them are imported, which registers them): its __init__.py holds that one
function, controller.py what it keeps between steps. The keyword-only parameters ARE the policy's options: `apply`
derives names, defaults and the error messages from the signature, so they are written once. attach changes a model by
helpers of saved_tensors/, which put what remove() takes back on the controller. No policy imports another's folder.

Three mechanisms exist, from the inside out:
    ops      a rule around one op's saved tensors: saved_tensors/rules/ (selective; the exact masks of bfp and gact)
    modules  a module's class or forward replaced in place: saved_tensors/class_swap.py (wtacrs, checkpoint)
    model    saved-tensor hooks while the model's forward runs: saved_tensors/hooks.py (bfp, gact, mesa)
A tensor that an inner mechanism keeps through `ctx.save_for_backward` (or a rule passes on) reaches the next one
outwards, so policies compose by being applied one after another, IN ANY ORDER:
    apply(model, "wtacrs"); apply(model, "bfp", bits=4)     the sampled rows are packed
    apply(model, "selective"); apply(model, "bfp")          only what a leaf needs is kept, and that is packed
    apply(model, "checkpoint"); apply(model, "bfp")         segment inputs are packed, and the recomputed stash too
    apply(model, "gact", format="snvint")                   GACT's bits for a block format: an option, not a pair
What a policy keeps already packed (uint8 codes, 1-bit masks, a dsq.Packed on ctx) is never packed again: hook policies
touch floating tensors only. Pairs that no policy names in `composes_with` are refused: two quantisers of one stash
make no sense.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, Self
from weakref import WeakSet

import torch
from torch import nn

from dsq.arguments import choice
from dsq.stash.compiled import compiled_blocks, compiled_calls, forget_compiled, inside_compiled

Compiled = Literal["nothing", "blocks", "model"]

_APPLIED = "_dsq_stash"  # attribute of the root module: {policy name: controller}
_ROOTS: WeakSet[nn.Module] = WeakSet()  # the modules that have it: a submodule does not know the models around it


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


class Undo:
    """What takes back the changes of a policy: functions of modules, hooks' handles and plain values."""

    def __init__(self) -> None:
        self._steps: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self._done = False

    def callback(self, step: Callable[..., Any], *args: Any) -> None:
        """Add ``step(*args)``; for a deep copy of the model it is called with the copies of the modules among args."""
        self._steps.append((step, args))

    def close(self) -> None:
        """Make all steps, the latest first; a second call does nothing."""
        if not self._done:
            self._done = True
            for step, args in reversed(self._steps):
                step(*args)

    def close_copy(self, model: nn.Module, copy: nn.Module) -> None:
        """The same for a deep copy of the model, which carries what was done to the model when it was made."""
        twins = dict(zip(model.modules(), copy.modules(), strict=True))
        for step, args in reversed(self._steps):
            if step is _remove_hook:
                _remove_hook_of_copy(args[0], copy)
            elif any(isinstance(arg, nn.Module) for arg in args):
                step(*(twins.get(arg, arg) if isinstance(arg, nn.Module) else arg for arg in args))


def _remove_hook(hook: Removable) -> None:
    hook.remove()


def _remove_hook_of_copy(hook: Removable, copy: nn.Module) -> None:
    if isinstance(hook, Controller):
        hook.remove(copy)
    for module in copy.modules():
        for name, hooks in vars(module).items():
            if name.endswith(("_hooks", "_hooks_with_kwargs", "_hooks_always_called")) and hooks is not None:
                hooks.pop(getattr(hook, "id", None), None)


@dataclass(eq=False)
class Controller(SharedByCopies):
    """A policy at work on one model. Policies subclass it to add what they keep between steps.

    `undo` collects what remove() takes back, in reverse order; helpers push onto it (hooks.around_forward,
    class_swap.swap_classes). state_dict() holds all that a resumed run needs to equal an unbroken one (estimates,
    caches, seeds).
    """

    model: nn.Module
    name: str = ""  # set by apply
    attached: tuple[str, ...] = ()
    undo: Undo = field(default_factory=Undo, repr=False)

    def report(self) -> Summary:
        """The latest training forward in numbers."""
        return Summary(self.name, self.attached)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; {} where the policy keeps nothing between steps."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave; ValueError names missing or unexpected keys."""
        check_keys(self.name, state, ())

    def until_removed(self, *hooks: Removable) -> None:
        """Let remove() take these hooks away."""
        for hook in hooks:
            self.undo.callback(_remove_hook, hook)

    def remove(self, copy: nn.Module | None = None) -> None:
        """Restore the model exactly: classes, attributes, hooks. A second call does nothing.

        copy: a deep copy of the model, made under the policy, to be restored instead: the two share this controller.
            ValueError where it is none, or was restored before.
        """
        if copy is None or copy is self.model:
            self.undo.close()
        elif copy.__dict__.get(_APPLIED, {}).get(self.name) is not self:
            raise ValueError(f"copy must be a deep copy of the model, made under its policy {self.name!r}")
        else:
            self.undo.close_copy(self.model, copy)


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


@dataclass(frozen=True)
class Policy:
    """One registry entry."""

    name: str
    attach: Callable[..., Controller]
    composes_with: frozenset[str]
    compiled: Compiled  #: what it may find compiled: "blocks" of the model, one by one, or the "model" itself too

    def options(self) -> dict[str, inspect.Parameter]:
        """The options of the policy: attach's parameters after the model."""
        parameters = inspect.signature(self.attach).parameters
        return dict(list(parameters.items())[1:])


_POLICIES: dict[str, Policy] = {}


def register(
    name: str, composes_with: tuple[str, ...] = (), compiled: Compiled = "nothing"
) -> Callable[[Callable[..., Controller]], Callable[..., Controller]]:
    """Enter `attach(model, *, options...) -> Controller` under a name; a pair is allowed when either names the other.

    attach checks its options and what it finds in the model BEFORE it changes anything, and raises ValueError.
    """

    def enter(attach: Callable[..., Controller]) -> Callable[..., Controller]:
        assert name not in _POLICIES, f"policy {name} registered twice"
        _POLICIES[name] = Policy(name, attach, frozenset(composes_with), compiled)
        return attach

    return enter


def policies() -> tuple[str, ...]:
    """The registered names."""
    return tuple(sorted(_POLICIES))


def apply(model: nn.Module, policy: str, **options: Any) -> Controller:
    """Attach a stash policy to a model, in place, and return its controller.

    The training loop stays a plain one: model(x), loss, backward. Parameters, state dict and module names stay. A deep
    copy of the model shares the controller; to be pickled as a whole, a model must be without policies.

    Raises:
        TypeError: model is no nn.Module, or an option the policy does not have (the message lists those it has).
        ValueError: unknown policy; the policy (or one it cannot share a model with) is already applied to the model, a
            submodule or a model around it; a model under torch.compile, or one whose blocks are, for a policy that
            does not go with that; an option out of range; a model in which the
            policy finds nothing to stash.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    entry = _POLICIES[choice("policy", policy, policies())]
    _check_options(entry, options)
    _check_others(model, entry)
    _check_compiled(model, entry)
    if next(model.parameters(), None) is None and next(model.children(), None) is None:
        raise ValueError("nothing to stash: the model has neither parameters nor submodules")
    forget_compiled()
    controller = entry.attach(model, **options)
    controller.name = policy
    controller.undo.callback(_forget, model, policy)
    controller.until_removed(model.register_forward_pre_hook(_RefuseCompiled(compiled_calls(model)), prepend=True))
    applied(model)[policy] = controller
    _ROOTS.add(model)
    return controller


def applied(model: nn.Module) -> dict[str, Controller]:
    """The policies applied to this very module (not to its children), name to controller."""
    here: dict[str, Controller] = model.__dict__.setdefault(_APPLIED, {})
    return here


def _forget(model: nn.Module, policy: str) -> None:
    here = applied(model)
    here.pop(policy, None)
    if not here:
        del model.__dict__[_APPLIED]
        _ROOTS.discard(model)


def _check_options(entry: Policy, options: Mapping[str, Any]) -> None:
    accepted = entry.options()
    for name in options:
        if name not in accepted:
            forms = ", ".join(f"{p.name}={p.default!r}" for p in accepted.values()) or "no option"
            raise TypeError(f"policy {entry.name!r} has no option {name!r}; it takes {forms}")


def compatible(one: str, other: str) -> bool:
    """Whether two policies may share a model: either names the other."""
    return other in _POLICIES[one].composes_with or one in _POLICIES[other].composes_with


def _check_others(model: nn.Module, entry: Policy) -> None:
    around = [root for root in _ROOTS if root is not model and any(module is model for module in root.modules())]
    places = [(model, "this model")]
    places += [(module, f"this submodule {name!r} of the model") for name, module in model.named_modules() if name]
    places += [(root, "a model around this one") for root in around]
    for other, where in ((other, where) for module, where in places for other in module.__dict__.get(_APPLIED, ())):
        if other == entry.name:
            raise ValueError(f"policy {other!r} is already applied to {where}; call remove() on its controller first")
        if not compatible(entry.name, other):
            goes_with = ", ".join(p for p in policies() if compatible(entry.name, p)) or "none"
            raise ValueError(f"policy {entry.name!r} cannot share a model with {other!r}; it goes with {goes_with}")


def _check_compiled(model: nn.Module, entry: Policy) -> None:
    found = dict(compiled_blocks(model))
    if found and entry.compiled == "nothing":
        able = ", ".join(p for p in policies() if _POLICIES[p].compiled != "nothing")
        raise ValueError(f"policy {entry.name!r} needs an eager model; under torch.compile go {able}")
    if model in found and (entry.compiled != "model" or found[model] != "forward"):
        raise ValueError(_COMPILE_BEFORE)


_COMPILE_BEFORE = (
    "dsq.stash does not work inside torch.compile: compile first, then stash.apply(compiled, ...) to "
    "compiled = torch.compile(model) (bfp, mesa), or to a model of which each block was compiled (bfp, gact, mesa)"
)


@dataclass(frozen=True)
class _RefuseCompiled:
    """A forward pre-hook: RuntimeError where the model is compiled, or a block that was not when the policy came; and
    under torch.func, which takes no saved-tensor hooks."""

    known: set[Callable[..., Any]]

    def __call__(self, module: nn.Module, args: Any) -> None:
        if inside_compiled() or (torch.is_grad_enabled() and not compiled_calls(module) <= self.known):
            raise RuntimeError(_COMPILE_BEFORE)
        if torch._C._functorch.peek_interpreter_stack() is not None:
            raise RuntimeError("stash policies do not go with torch.func: remove() them, or use stash='linears'")
