"""The registry of stash policies: functions that attach to a model and return a controller.

A policy is a file of dsq/stash/methods/, named in its __init__.py. The keyword-only parameters of its function are the
policy's options: `apply` derives names, defaults and the error messages from the signature.

Policies compose by being applied one after another, in any order:
    apply(model, "wtacrs"); apply(model, "bfp", bits=4)     the sampled rows are packed
    apply(model, "selective"); apply(model, "bfp")          only what a leaf needs is saved, and that is packed
    apply(model, "checkpoint"); apply(model, "bfp")         segment inputs are packed, and the recomputed stash too
Pairs that no policy names in `composes_with` are refused: two quantizers of one stash make no sense.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from dsq.arguments import choice
from dsq.process_memory import suit_a_packed_stash
from dsq.stash.controller import COMPILE_BEFORE, Controller, applied, compiled_blocks, intercept

_ROOTS: WeakSet[nn.Module] = WeakSet()  # the models under policies: a submodule does not know the models around it


@dataclass(frozen=True)
class Policy:
    """One registry entry."""

    name: str
    attach: Callable[..., Controller]
    composes_with: frozenset[str]
    compiles: bool  #: whether the model, or blocks of it, may be compiled before


_POLICIES: dict[str, Policy] = {}


def register(
    name: str, composes_with: tuple[str, ...] = (), compiles: bool = False
) -> Callable[[Callable[..., Controller]], Callable[..., Controller]]:
    """Enter `attach(model, *, options...) -> Controller` under a name; a pair is allowed when either names the other.

    attach checks its options and what it finds in the model BEFORE it changes anything, and raises ValueError.
    """

    def enter(attach: Callable[..., Controller]) -> Callable[..., Controller]:
        if name in _POLICIES:
            raise ValueError(f"policy must have a name of its own, got {name!r}, which is registered")
        _POLICIES[name] = Policy(name, attach, frozenset(composes_with), compiles)
        return attach

    return enter


def policies() -> tuple[str, ...]:
    """Return the registered names."""
    return tuple(sorted(_POLICIES))


def apply(model: nn.Module, policy: str, **options: Any) -> Controller:
    """Attach a stash policy to a model, in place, and return its controller.

    The training loop stays a plain one: model(x), loss, backward. Parameters, state dict and module names stay. A deep
    copy of the model shares the controller; to be pickled as a whole, a model must be without policies.

    Raises:
        TypeError: model is no nn.Module, or an option the policy does not have (the message lists those it has).
        ValueError: unknown policy; the policy (or one it cannot share a model with) is already applied to the model, a
            submodule or a model around it; a model under torch.compile, or one whose blocks are, for a policy that
            does not go with that; an option out of range; a model in which the policy finds nothing to stash.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    entry = _POLICIES[choice("policy", policy, policies())]
    _check_options(entry, options)
    _check_others(model, entry)
    _check_compiled(model, entry)
    suit_a_packed_stash()
    if "torch._dynamo" in sys.modules:  # what was compiled before a policy is compiled anew, under its mode
        sys.modules["torch._dynamo"].reset()
    controller = entry.attach(model, **options)
    controller.name, controller.compiles = policy, entry.compiles
    intercept(controller, model)  # controller.remove() takes it back
    _ROOTS.add(model)
    return controller


def _check_options(entry: Policy, options: Mapping[str, Any]) -> None:
    _, *accepted = inspect.signature(entry.attach).parameters.values()  # the first is the model
    for name in options.keys() - {option.name for option in accepted}:
        forms = ", ".join(f"{option.name}={option.default!r}" for option in accepted) or "no option"
        raise TypeError(f"policy {entry.name!r} has no option {name!r}; it takes {forms}")


def compatible(one: str, other: str) -> bool:
    """Return whether two policies may share a model: either names the other."""
    return other in _POLICIES[one].composes_with or one in _POLICIES[other].composes_with


def _check_others(model: nn.Module, entry: Policy) -> None:
    outer_models = [root for root in _ROOTS if root is not model and any(module is model for module in root.modules())]
    for other in (other for place in (*model.modules(), *outer_models) for other in applied(place)):
        if not compatible(entry.name, other):
            goes_with = ", ".join(p for p in policies() if compatible(entry.name, p)) or "none"
            conflict = f"{other!r}, already applied to this model, a part of it or a model around it"
            way = ' (stash="all" is bfp; stash="linears" is no policy)' if "bfp" in (entry.name, other) else ""
            raise ValueError(
                f"policy {entry.name!r} cannot share a model with {conflict}; it goes with {goes_with}{way}"
            )


def _check_compiled(model: nn.Module, entry: Policy) -> None:
    if not entry.compiles and next(compiled_blocks(model), None) is not None:
        able = ", ".join(p for p in policies() if _POLICIES[p].compiles)
        raise ValueError(f"policy {entry.name!r} needs an eager model; under torch.compile go {able}")
    if type(model).__name__ != "OptimizedModule" and model._compiled_call_impl is not None:
        raise ValueError(COMPILE_BEFORE)


def run_eagerly() -> AbstractContextManager[Any]:
    """Let compiled modules run as they were before: a mode that sees every operation sees none inside of a graph."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
