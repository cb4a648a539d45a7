"""The first training forward of a model, in which ``levels="auto"`` is decided.

It is the first forward with gradients, also in evaluation mode. Converted layers see it, by hooks, and not the model:
trainers such as accelerate turn autocast on inside of its call.

    undecided --- under autocast, or on a device that multiplies bfloat16 --> saving
        `------- otherwise --> simulation, open --- a later layer is under autocast --> saving; that forward is mixed
                                          `------- the first layer again, or an update recorded --> simulation

The hooks need no DynamicPrecision that lives on: a trainer may keep none for a schedule of one level.
"""

import logging
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import nn

from dsq.config import DSQConfig
from dsq.layers import not_compiled_alone
from dsq.quantizers import Quantized

_trials = 0  #: runs of models that go on which are no training
_LOG = logging.getLogger("dsq")


class FirstTraining:
    """A forward pre-hook of layers: decides the levels of ``model`` in its first training forward, or in a copy's.

    Deep copies of the model, such as an EMA, share the hook and follow the decision at their next forward. Pickled, it
    does nothing afterwards.

    Args:
        model: whose layers are set to the level; referred to weakly.
        config: whose levels are "auto"; None: nothing is to be decided.
        take: a method, referred to weakly, that is called with the decided config.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        config: DSQConfig | None = None,
        take: Callable[[DSQConfig], None] | None = None,
    ) -> None:
        self.config = config
        self._undecided = config
        self._opener: Callable[[], nn.Module | None] | None = None  #: that decided; None: finally
        self._traced = False  #: whether a compiler traced the layer that decided
        self._model = (lambda: None) if model is None else ref(model)
        self._take = (lambda: None) if take is None else WeakMethod(take)

    @not_compiled_alone  # of a block that is a converted layer itself, whose forward may be several graphs
    def __call__(self, layer: nn.Module, args: Any) -> None:
        if not isinstance(layer, Quantized):
            return
        if torch.is_grad_enabled() and _trains(layer, args):  # awaited or not: a compiler may trace it twice
            _decide(self, layer)
        elif not self.awaited:
            _follow(self, layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> "FirstTraining":
        return self

    def __reduce__(self) -> Any:
        return FirstTraining, ()

    @property
    def awaited(self) -> bool:
        """Return whether the first training forward is to come."""
        return self.config is not None and self.config.undecided

    def is_awaited_of(self, model: nn.Module) -> bool:
        """Return whether that of ``model`` is to come, and not of one that it is a copy of."""
        return self.awaited and self._model() is model

    def layers(self) -> list[nn.Module]:
        """Return the layers of the model that have the hook: none if it was unconverted since."""
        model = self._model()
        return [] if model is None else [m for m in model.modules() if self in m._forward_pre_hooks.values()]

    def decide(self, layers: Iterable[Any], opener: nn.Module | None = None) -> None:
        """Decide the levels by what the trainer does and the device can do now, and set layers to the first.

        Without autocast the decision stays open until ``opener`` is called again, if it is given.
        """
        device = next((p.device for layer in layers for p in layer.parameters()), None)
        if self.config is None or not self.awaited or device is None:
            return
        # accelerate's prepare wraps the forward of a model, which may be a single layer, in autocast
        wrapped = opener is not None and "_original_forward" in vars(opener)
        reason = _reason_to_save(device, wrapped)
        self._opener = None if reason or opener is None else ref(opener)
        self._traced = torch.compiler.is_compiling()
        self._settle(self.config.decided(saves=bool(reason)), layers, reason or "not under autocast")

    def decide_to_save(self, layer: nn.Module) -> None:
        """Decide for saving, if that is what the call of ``layer`` that comes will decide.

        Called before a compiler traces the layer, whose graph would be compiled again for the level that it decides.
        """
        device = next((p.device for p in layer.parameters()), None)
        if _trials or device is None or not (self.awaited and torch.is_grad_enabled() and _trains(layer, ())):
            return
        if _reason_to_save(device):
            self.decide(self.layers())

    def _settle(self, config: DSQConfig, layers: Iterable[Any], reason: str) -> None:
        """Set layers to the first of the decided levels."""
        self.config = config
        for layer in layers:
            self.set_level(layer)
        take = self._take()
        if take is not None:
            take(config)
        _LOG.info("levels: %s, %s (%s)", config.levels[0], config.at(0).mode, reason)

    def revise(self, layer: nn.Module) -> None:
        """Decide for saving if ``layer`` is under autocast while the decision is open; close it at its opener.

        Warns instead if a compiler traced the opener: its graph has the formats that were decided first.
        """
        if self._opener is None or _trials or not torch.is_grad_enabled():
            return
        device = next((p.device.type for p in layer.parameters()), "cpu")
        if torch.is_autocast_enabled(device) and self._undecided is not None:
            if self._traced:
                text = "the first layer of the compiled model is outside of autocast, so that products are simulated"
                warnings.warn(f'{text}; to pack alone, write dsq.DynamicPrecision(model, "[-,4,-,-]")', stacklevel=2)
            else:
                self._settle(self._undecided.decided(saves=True), self.layers(), "a later layer is under autocast")
            self.close()
        elif layer is self._opener():
            self.close()

    def close(self) -> None:
        """Make the decision final, if there was one."""
        if self._opener is not None:
            self._opener = None
            for layer in self.layers():
                self.set_level(layer)

    def set_level(self, layer: Any) -> None:
        """Set a layer to the level that was decided; if that is final, the layer has the hook no more."""
        if self.config is not None:
            layer.quantizers = self.config.at(0)
        # a graph has guards on the hooks that it was traced with
        if self._opener is None and not self._traced and not torch.compiler.is_compiling():
            forget([layer], but=lambda other: other is not self)


def decide_to_save(layer: nn.Module) -> None:
    """Let the hooks of ``layer``, if it has any, do so."""
    for hook in list(layer._forward_pre_hooks.values()):
        if isinstance(hook, FirstTraining):
            hook.decide_to_save(layer)


def forget(layers: Iterable[Any], but: Callable[[FirstTraining], bool] = lambda hook: False) -> None:
    """Remove the hooks from layers, except those for which ``but`` is true."""
    for layer in layers:
        for number, hook in list(layer._forward_pre_hooks.items()):
            if isinstance(hook, FirstTraining) and not but(hook):
                del layer._forward_pre_hooks[number]


def awaited(layers: Iterable[nn.Module]) -> bool:
    """Return whether a first training forward of the layers will decide their levels."""
    hooks = [hook for layer in layers for hook in layer._forward_pre_hooks.values()]
    return any(isinstance(hook, FirstTraining) and hook.awaited for hook in hooks)


def _trains(layer: nn.Module, args: Any) -> bool:
    """Return whether a call of ``layer`` with gradients belongs to a training, perhaps in evaluation mode."""
    tensors = [*(x for x in args if isinstance(x, torch.Tensor)), *layer.parameters()]
    return layer.training or any(x.requires_grad for x in tensors)


def _decide(hook: FirstTraining, layer: nn.Module) -> None:
    if not hook.awaited:  # since the compiler that traces the hook read whether it is
        _follow(hook, layer)
    elif not _trials:
        hook.decide([layer, *hook.layers()], opener=layer)


def _follow(hook: FirstTraining, layer: Any) -> None:
    """Set a layer to the level that was decided, which it may revise."""
    hook.revise(layer)
    hook.set_level(layer)


# torch.compiler.assume_constant_result without its import, which takes a second: where a compiler traces the hook, it
# calls these functions, before it reads the layers' formats
_decide._dynamo_marked_constant = True  # type: ignore[attr-defined]
_follow._dynamo_marked_constant = True  # type: ignore[attr-defined]


@contextmanager
def trial() -> Iterator[None]:
    """Run models inside without a decision."""
    global _trials
    _trials += 1
    try:
        yield
    finally:
        _trials -= 1


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether the device has units that multiply matrices of bfloat16."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type == "cpu" and bool(torch.cpu.get_capabilities().get("amx_bf16"))


def _reason_to_save(device: torch.device, autocast: bool = False) -> str:
    """Return why products are left to the device; "" if they are simulated. ``autocast``: it will be on."""
    if autocast or torch.is_autocast_enabled(device.type):
        return "under autocast"
    if _agreed(f"dsq/multiplies_bfloat16/{device.type}", multiplies_bfloat16(device)):
        return f"{device.type} multiplies bfloat16"
    return ""


def _agreed(question: str, answer: bool) -> bool:
    """Return the answer of that process of a distributed training which came first: devices may differ.

    It goes through the store, as a collective would wait for processes that may have no such model.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return answer
    try:
        store: Any = torch.distributed.distributed_c10d._get_default_store()
        return bool(store.compare_set(question, "", str(int(answer))) == b"1")
    except (AttributeError, RuntimeError):  # MPI has no store, and the store of a fake group compares nothing
        return answer
