"""A model under a schedule of precisions: converted, put to each level as it comes, and saved beside the weights.

    dynamic = dsq.DynamicPrecision(model, config)                                 # converts the model
    dynamic.record(updates=1, tokens=n); dynamic.step(validation_loss)            # the level rises by itself
    torch.save({"model": model.state_dict(), "dsq": dynamic.state_dict()}, path)  # plain data, which JSON takes too

accelerate: ``accelerator.register_for_checkpointing(dynamic)``.
"""

import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from dsq.arguments import whole_number
from dsq.config import DSQConfig
from dsq.conversion import check_conversion, convert, converted, converted_parts, is_converted, set_level, unconvert
from dsq.gradient_check import GradientCheck, compare
from dsq.process_memory import resident
from dsq.scheduler import updates_left
from dsq.stash.controller import applied
from dsq.stash.interception import RulePolicy

_KEYS = {"config", "scheduler"}
_MANY = 1000  #: updates after which a validation is missed
_LOADED = "_dsq_loaded"  #: attribute of a model whose state dict was loaded since its DynamicPrecision was made
#: those of a model since it was converted
_SCHEDULES: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet["DynamicPrecision"]] = weakref.WeakKeyDictionary()
_LOG = logging.getLogger("dsq")  #: what happens once


class DynamicPrecision:
    """A model under the schedule of its config.

    Args:
        model: converted in place, if it is not. If a part of it was, by itself, the whole is converted anew.
        config: a DSQConfig, or the schedule as text; None: what is advised, as ``DSQConfig.of`` says.
        total_updates: of the run, where ``rise_at`` has fractions.
        options: beside text or None, other fields of DSQConfig.
    Raises:
        TypeError, ValueError: as ``dsq.convert`` and ``DSQConfig.scheduler`` do; if the model was converted before by a
            config that ``convert`` acts on otherwise, or another DynamicPrecision with another config has it.
    """

    def __init__(
        self,
        model: nn.Module,
        config: DSQConfig | str | None = None,
        total_updates: int | None = None,
        **options: Any,
    ) -> None:
        self.model = model
        self.config = DSQConfig.of(config, **options)
        _refuse_second(model, self.config)
        if not is_converted(model):
            _SCHEDULES.pop(model, None)
        _convert(model, self.config)
        _SCHEDULES.setdefault(model, weakref.WeakSet()).add(self)
        model.__dict__.pop(_LOADED, None)
        self._hook = model.register_load_state_dict_post_hook(_note_loaded)
        self._total_updates = total_updates
        self.scheduler = self.config.scheduler(total_updates)
        set_level(model, self.config, 0)
        self._check: GradientCheck | None = None
        self._checked_at = 0  #: the update of it

    def record(self, updates: int | Tensor = 1, tokens: int | Tensor = 0) -> bool:
        """Count work, as ``PrecisionScheduler.record``. True if the level rose; the model is at it then.

        Warns once where the level waits for a validation that has not come in 1,000 updates, and where the first update
        came without a call of the model, in which alone ``stash="all"`` packs; or after the model's state dict was
        loaded, and this one's was not.
        """
        before = self.scheduler.updates
        if self.model.__dict__.pop(_LOADED, False) and before == 0:
            text = "a state dict was loaded into the model, and none into its DynamicPrecision, which begins anew; to "
            text += (
                'resume, call dynamic.load_state_dict(saved["dsq"]); load pretrained weights before DynamicPrecision'
            )
            warnings.warn(text, stacklevel=2)
        self._hook.remove()
        if before == 0 and _never_called(self.model):
            text = 'stash="all" packs in calls of the model, and none came: its linear layers alone keep few bits'
            warnings.warn(f"{text}; let forward compute the loss, where another method does", stacklevel=2)
        rose = self._set_level(self.scheduler.record(updates, tokens))
        now = self.scheduler
        validated = now.level > 0 or now.validations_without_improvement > 0 or math.isfinite(now.best)
        if before < _MANY <= now.updates and self.config.follows_validation and not validated:
            text = f"{now.updates} updates at {now.precision} and no validation: the level waits for dynamic.step(loss)"
            warnings.warn(f"{text}; or give rise_at", stacklevel=2)
        return rose

    def step(self, loss: float | Tensor) -> bool:
        """Take note of a validation loss, as ``PrecisionScheduler.step``. True if the level rose."""
        return self._set_level(self.scheduler.step(loss))

    def began_after(self, updates: int) -> None:
        """Say how many of ``total_updates`` the run has made so far, with DSQ or without: fractions of ``rise_at`` are
        of all but those without.

        To be called after ``load_state_dict``. Raises ValueError where ``updates`` is no whole number from 0.
        """
        without = whole_number("updates", updates, 0) - self.scheduler.updates
        if without > 0:
            self.scheduler.rise_at = self.config.scheduler(updates_left(self._total_updates, without)).rise_at

    def check(self, loss: Callable[[], Tensor], every: int = 400) -> GradientCheck | None:
        """Compare the gradient of ``loss()`` with the unquantized one, for ``metrics`` (dsq/gradient_check.py).

        Call it at each update, on every process. The first call compares, and later ones where ``every`` updates were
        recorded since; else it does nothing and returns None. A comparison takes the time of three steps on what
        ``loss`` runs, and the memory of a plain step and one more set of gradients: give it one micro-batch. The
        training does not change. Warns where the grade is not "fine", after a fourth step that tells whether ``loss``
        runs the same batch at each call.

        Args:
            loss: runs the model and returns its loss, as in ``dynamic.check(lambda: criterion(model(x), y))``.
        """
        every, updates = whole_number("every", every, 1), self.scheduler.updates
        if not callable(loss):
            raise TypeError(f"loss must be a function, as in check(lambda: criterion(model(x), y)), got {type(loss)}")
        if self._check is not None and updates < self._checked_at + every:
            return None
        self._check, self._checked_at = compare(self.model, loss), updates
        if self._check.grade != "fine":
            warnings.warn(f"at update {updates}: {self._check.verdict}", stacklevel=2)
        return self._check

    def metrics(self) -> dict[str, float]:
        """Return figures for a logger: "dsq/level", "dsq/stash_bits" (q1, at which it stashes), "dsq/mean_bits" (their
        mean over the updates so far), "dsq/validations_without_improvement" (validations without improvement); under
        ``stash="all"`` "dsq/stash_mib", what the latest forward kept. On Linux also MiB of the process,
        "dsq/process_resident_mib" and "dsq/process_peak_mib"; after ``check`` "dsq/gradient_error",
        "dsq/gradient_error_of_stash" and "dsq/gradient_cosine", the worst of a parameter.
        """
        now = self.scheduler
        spent = sum(level.q1 * work.updates for level, work in zip(now.levels, now.work, strict=True))
        found = {
            "level": float(now.level),
            "stash_bits": float(now.precision.q1),
            "validations_without_improvement": float(now.validations_without_improvement),
        }
        found["mean_bits"] = spent / now.updates if now.updates else found["stash_bits"]
        found |= {f"process_{name}_mib": nbytes / 2**20 for name, nbytes in resident().items()}
        if (check := self._check) is not None:
            found |= {"gradient_error": check.error, "gradient_cosine": check.cosine}
            found["gradient_error_of_stash"] = check.of_stash
        return {f"dsq/{name}": value for name, value in (found | stash_mib(self.model)).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the config and where the schedule stands, as plain data."""
        return {"config": self.config.as_dict(), "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from ``state``, with its config; warn if that differs from this one's.

        Raises ValueError where ``state`` is none that ``state_dict`` gave, or its model was converted in another way.
        """
        config = _config(state)
        scheduler = config.scheduler(self._total_updates)
        scheduler.load_state_dict(state["scheduler"])
        check_conversion(self.model, config, "the state's config")
        self.model.__dict__.pop(_LOADED, None)
        self._hook.remove()
        asked = self.config.as_dict()
        self.config, self.scheduler = config, scheduler
        set_level(self.model, config, scheduler.level)
        other = [f"{name}={value!r}" for name, value in config.as_dict().items() if value != asked[name]]
        if other:
            text = f"the run goes on with the config of its state: {', '.join(other)}, not with what was given now"
            warnings.warn(text, stacklevel=2)

    def _set_level(self, rose: bool) -> bool:
        if rose:
            set_level(self.model, self.config, self.scheduler.level)
            _LOG.info("update %d: rose to %s", self.scheduler.updates, self.scheduler.precision)
        return rose


def _refuse_second(model: nn.Module, config: DSQConfig) -> None:
    """Raise ValueError if another DynamicPrecision has ``model``, or a part of it, with another config."""
    converted_modules = (module for module in model.modules() if module in _SCHEDULES and is_converted(module))
    for other in (dynamic for module in converted_modules for dynamic in _SCHEDULES[module]):
        first, second = other.config.as_dict(), config.as_dict()
        if differing := ", ".join(f"{name}={first[name]!r}" for name in first if first[name] != second[name]):
            text = f"config must be that of the DynamicPrecision which the model has, with {differing}"
            raise ValueError(f"{text}; or call dsq.unconvert(model) first")


def _note_loaded(model: nn.Module, _: object) -> None:
    model.__dict__[_LOADED] = True


def _never_called(model: nn.Module) -> bool:
    """Return whether the policy of ``stash="all"`` saw no forward, in a process that compiled nothing: a graph has no
    count of its calls."""
    policy, compiler = applied(model).get("bfp"), sys.modules.get("torch._dynamo.convert_frame")
    return isinstance(policy, RulePolicy) and policy.latest is None and not getattr(compiler, "FRAME_COUNTER", 0)


def stash_mib(model: nn.Module) -> dict[str, float]:
    """Return "stash_mib", what the latest forward kept under the model's stash policies; nothing of a compiled one."""
    kept = sum(policy.report().saved_bytes for policy in applied(model).values())
    return {"stash_mib": kept / 2**20} if kept else {}


def convert_at(model: nn.Module, state: dict[str, Any]) -> None:
    """Convert ``model``, in place, as ``state`` of a DynamicPrecision says, at its level: to evaluate.

    Raises ValueError where ``state`` is no such state, or ``model`` was converted in another way.
    """
    config, scheduler = _config(state), state["scheduler"]
    _convert(model, config, "the state's config")
    level: Any = scheduler.get("level") if isinstance(scheduler, dict) else None
    set_level(model, config, level)


def _config(state: dict[str, Any]) -> DSQConfig:
    if not isinstance(state, dict) or set(state) != _KEYS:
        got = sorted(state) if isinstance(state, dict) else repr(state)
        raise ValueError(f"state must have the keys {sorted(_KEYS)}, as DynamicPrecision.state_dict gives, got {got}")
    return DSQConfig.from_dict(state["config"])


def _convert(model: nn.Module, config: DSQConfig, of: str = "config") -> None:
    parts = converted_parts(model)
    if is_converted(model):
        check_conversion(model, config, of)
    for part in parts:
        unconvert(part)
    if parts or not is_converted(model):
        convert(model, config)
        text = "converted %d layers to %s, stash=%r; print(dsq.report(model, batch)) says what was left"
        _LOG.info(text, len(converted(model)), config.levels[0], config.stash)
