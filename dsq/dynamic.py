"""Train a model under a schedule of precisions: convert it, raise its level, and save the schedule's state.

    dynamic = dsq.DynamicPrecision(model, config)                                 # converts the model
    dynamic.record(updates=1, tokens=n); dynamic.step(validation_loss)            # these raise the level
    torch.save({"model": model.state_dict(), "dsq": dynamic.state_dict()}, path)  # data that JSON can hold too

accelerate: ``accelerator.register_for_checkpointing(dynamic)``.
"""

import logging
import math
import sys
import warnings
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from dsq.arguments import check_keys, whole_number
from dsq.config import DSQConfig
from dsq.conversion import (
    check_conversion,
    convert,
    converted,
    converted_parts,
    is_conversion_root,
    is_converted,
    set_level,
    unconvert,
)
from dsq.first_training import FirstTraining, forget
from dsq.gradient_check import GradientCheck, compare, gradients
from dsq.layers.own_products import set_watches, watches
from dsq.precision import DEFAULT_LEVELS, SAVING_LEVELS
from dsq.process_memory import resident
from dsq.scheduler import updates_left
from dsq.stash.controller import applied
from dsq.stash.interception import RulePolicy

_WATCHES = "own_products"  #: a key of states, of models whose modules have matrices of their own
_MAX_RECORDS_WITHOUT_CALL = 100  #: after which a model that is not called any more is warned of
_MAX_UPDATES_BEFORE_VALIDATION = 1000  #: after which a missing validation is warned of
_FORGOTTEN = (
    "a state dict was loaded into the model, and none into its DynamicPrecision, which begins anew; to resume, "
    'call dynamic.load_state_dict(saved["dsq"]); load pretrained weights before DynamicPrecision'
)
#: the DynamicPrecisions of a model since its conversion
_SCHEDULES: weakref.WeakKeyDictionary[nn.Module, weakref.WeakSet["DynamicPrecision"]] = weakref.WeakKeyDictionary()
_LOG = logging.getLogger("dsq")


class WeightsLoaded:
    """A hook of ``load_state_dict``, that of a model, which notes that it ran; pickled with the model."""

    loaded = False

    def __call__(self, model: nn.Module, keys: object) -> None:
        self.loaded = True


@dataclass
class WaitForValidation:
    """The updates of a schedule that waits for its first validation; outlives its DynamicPrecision, to warn then."""

    level: str
    over: bool  #: a validation came, or none is needed, or a warning said that none will come
    updates: int = 0  #: at the latest record

    def warn(self, stacklevel: int = 1) -> None:
        if self.updates and not self.over:
            self.over = True
            text = f"{self.updates} updates at {self.level} and no validation: the level waits for dynamic.step(loss)"
            warnings.warn(f"{text}; or give rise_at", stacklevel=stacklevel)


class DynamicPrecision:
    """A model under the schedule of its config.

    Without levels, ``"auto"`` is decided at the first training forward, for good: ``"[-,4,-,-]"``, which packs saved
    tensors alone, under autocast and on devices that multiply bfloat16, else ``"[8,4,8,8]"``.

    Args:
        model: converted in place, unless it was before. If only a part of it was, all of it is converted again.
        config: a DSQConfig, or the schedule as text, ``"[4,3,3,8] [8,4,4,8]"``; None: the defaults.
        total_updates: of the run; required if ``rise_at`` has fractions.
        options: beside text or None, other fields of DSQConfig.
    Raises:
        TypeError, ValueError: as ``dsq.convert`` and ``DSQConfig.scheduler`` do; if the model was converted before with
            other options, or has another DynamicPrecision with another config.
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
            for before in _SCHEDULES.pop(model, ()):
                before._first = None
        _convert(model, self.config)
        _SCHEDULES.setdefault(model, weakref.WeakSet()).add(self)
        self._weights = WeightsLoaded()
        self._hook = model.register_load_state_dict_post_hook(self._weights)
        self._total_updates = total_updates
        self.scheduler = self.config.scheduler(total_updates)
        set_level(model, self.config, 0)
        self._first: FirstTraining | None = None  #: that is to decide, or did
        self._await_decision()
        self._converted = next(filter(is_conversion_root, model.modules()), None)
        self._calls = 0  #: of the model, at the latest record
        self._records_without_call = _MAX_RECORDS_WITHOUT_CALL - 1  #: so that the first one is warned of
        self._check: GradientCheck | None = None
        self._checked_at = 0  #: in updates
        self._step_without_record = False  #: a warning said so
        self.waiting = WaitForValidation(str(self.scheduler.precision), over=not self.config.follows_validation)
        weakref.finalize(self, self.waiting.warn)

    def __repr__(self) -> str:
        mode = "undecided" if self.config.undecided else self.config.at(self.scheduler.level).mode
        where = f"level {self.scheduler.level + 1} of {len(self.config.levels)}, {self.scheduler.updates} updates"
        return f"DynamicPrecision({self.scheduler.precision}, {mode}, {where})"

    def record(self, updates: int | Tensor = 1, tokens: int | Tensor = 0) -> bool:
        """Count work, as ``PrecisionScheduler.record``, and set the model to the level. Return whether the level rose.

        Warns once if the level waits for a validation and none came in 1,000 updates, or until this object ends; if the
        first update, or 100 in succession, came without a call of the model, in which alone ``stash="all"`` packs; if
        the model was unconverted; and if its state dict was loaded without that of this object.
        """
        for text in (self._forgotten_state(), self._loss_of_effect()):
            if text:
                warnings.warn(text, stacklevel=2)
        if self._first and self.config.undecided:  # no layer saw a forward with gradients
            FirstTraining(take=self._take, config=self.config).decide(converted(self.model).values())
        elif self._first:
            self._first.close()
        rose = self._set_level(self.scheduler.record(updates, tokens))
        self.waiting.updates = self.scheduler.updates
        if self.waiting.updates >= _MAX_UPDATES_BEFORE_VALIDATION:
            self.waiting.warn(stacklevel=3)
        return rose

    def step(self, loss: float | Tensor) -> bool:
        """Record a validation loss, as ``PrecisionScheduler.step``. Return whether the level rose.

        Warns once if ``rise_at`` counts updates and none was recorded.
        """
        self.waiting.over = True
        if self.config.rise_at and not self.scheduler.updates and not self._step_without_record:
            self._step_without_record = True
            text = "rise_at counts the updates that dynamic.record() gets, and none came before dynamic.step(loss)"
            warnings.warn(f"{text}: call it after each update", stacklevel=2)
        return self._set_level(self.scheduler.step(loss))

    def began_after(self, updates: int) -> None:
        """Set how many of ``total_updates`` the run has made so far, with DSQ or without it.

        ``rise_at`` fractions apply to the updates that remain after those without. Call it after ``load_state_dict``.
        Raises ValueError if ``updates`` is no whole number from 0.
        """
        earlier_updates = whole_number("updates", updates, 0) - self.scheduler.updates
        if earlier_updates > 0:
            self.scheduler.rise_at = self.config.scheduler(updates_left(self._total_updates, earlier_updates)).rise_at

    def check(self, loss: Callable[[], Tensor], every: int = 400) -> GradientCheck | None:
        """Compare the gradient of ``loss()`` with the unquantized one, for ``metrics`` (dsq/gradient_check.py).

        Call it at each update, on every process. The first call compares, as does a later one after ``every`` more
        updates; other calls return None. A comparison takes the time of three steps and the memory of an unquantized
        step and one more set of gradients: use one micro-batch. The training does not change. Warns if the grade is
        not "fine", after two more steps that tell whether ``loss`` runs the same batch at each call.

        Args:
            loss: runs the model and returns its loss, as in ``dynamic.check(lambda: criterion(model(x), y))``.
            every: updates between two comparisons.
        """
        every, updates = whole_number("every", every, 1), self.scheduler.updates
        if not callable(loss):
            raise TypeError(f"loss must be a function, as in check(lambda: criterion(model(x), y)), got {type(loss)}")
        if self._check is not None and updates < self._checked_at + every:
            return None
        if self.config.undecided:
            gradients(self.model, loss)
        self._check, self._checked_at = compare(self.model, loss), updates
        if self._check.grade != "fine":
            warnings.warn(f"at update {updates}: {self._check.verdict}", stacklevel=2)
        return self._check

    def metrics(self) -> dict[str, float]:
        """Return figures for a logger.

        "dsq/level": the level, from 0. "dsq/simulation": 1 if products are quantized, 0 if saved tensors alone are
        packed. "dsq/stash_bits": q1 of the level. "dsq/mean_bits": the mean of q1 over the
        updates so far. "dsq/validations_without_improvement". Under ``stash="all"``, "dsq/stash_mib": MiB that
        operations with a rule saved in the latest forward; ``dsq.report`` counts all. On Linux,
        "dsq/process_resident_mib" and "dsq/process_peak_mib": MiB of the process. After ``check``,
        "dsq/gradient_error", "dsq/gradient_error_of_stash" and "dsq/gradient_cosine", the least of a parameter.
        """
        scheduler, check = self.scheduler, self._check
        q1_updates = sum(level.q1 * work.updates for level, work in zip(scheduler.levels, scheduler.work, strict=True))
        stash_bits = float(scheduler.precision.q1)
        figures = {
            "level": float(scheduler.level),
            "simulation": float(self.config.at(scheduler.level).mode == "simulation"),
            "stash_bits": stash_bits,
            "mean_bits": q1_updates / scheduler.updates if scheduler.updates else stash_bits,
            "validations_without_improvement": float(scheduler.validations_without_improvement),
        }
        figures |= {f"process_{name}_mib": nbytes / 2**20 for name, nbytes in resident().items()}
        if check is not None:
            figures |= {"gradient_error": check.error, "gradient_error_of_stash": check.of_stash}
            figures["gradient_cosine"] = check.cosine
        return {f"dsq/{name}": value for name, value in (figures | stash_mib(self.model)).items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the config, the state of the schedule, and which modules were seen to multiply by their own matrices.

        It is data for JSON.
        """
        state: dict[str, Any] = {"config": self.config.as_dict(), "scheduler": self.scheduler.state_dict()}
        watch = watches(self.model)
        return state | ({_WATCHES: watch} if watch else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from ``state``, with its config; warn if that differs from the present one.

        Raises ValueError if ``state`` is not of ``state_dict``, or its model was converted with other options.
        """
        config = _config(state)
        scheduler = config.scheduler(self._total_updates)
        scheduler.load_state_dict(state["scheduler"])
        check_conversion(self.model, config, "the state's config")
        set_watches(self.model, state.get(_WATCHES, {}))
        self._hook.remove()
        self._weights.loaded = False
        present, ignored = self.config.as_dict(), ("levels",) if self.config.undecided else ()
        self.config, self.scheduler = config, scheduler
        validated = scheduler.level > 0 or scheduler.validations_without_improvement > 0 or scheduler.best < math.inf
        self.waiting.level, self.waiting.over = str(scheduler.precision), validated or not config.follows_validation
        set_level(self.model, config, scheduler.level)
        self._await_decision()
        other = [
            f"{name}={value!r}"
            for name, value in config.as_dict().items()
            if value != present[name] and name not in ignored
        ]
        if other:
            text = f"the run goes on with the config of its state: {', '.join(other)}, not with what was given now"
            warnings.warn(text, stacklevel=2)

    def _forgotten_state(self) -> str:
        """Return a warning, at the first update, if weights were loaded since this object began; else ""."""
        self._hook.remove()
        return _FORGOTTEN if self._weights.loaded and self.scheduler.updates == 0 else ""

    def _loss_of_effect(self) -> str:
        """Return a warning, once, if the conversion ended or the policy of ``stash="all"`` sees no forward; else "".

        A compiled graph does not count its calls: a process that compiled anything is not warned of the second.
        """
        root = self._converted
        if root is None:
            return ""
        if not is_conversion_root(root):
            self._converted = None
            return "the model was unconverted: it trains in floating point; to go on, make a new DynamicPrecision"
        policy, compiler = applied(root).get("bfp"), sys.modules.get("torch._dynamo.convert_frame")
        if not isinstance(policy, RulePolicy):
            return ""
        called, self._calls = policy.forwards != self._calls, policy.forwards
        self._records_without_call = 0 if called else self._records_without_call + 1
        if self._records_without_call != _MAX_RECORDS_WITHOUT_CALL or getattr(compiler, "FRAME_COUNTER", 0) > 0:
            return ""
        text = 'stash="all" packs in calls of the model, and none came: only its linear layers save few bits'
        return f"{text}; let forward compute the loss instead of another method"

    def _await_decision(self) -> None:
        """Let the first training forward of converted layers decide the levels, if they are "auto"."""
        layers, before = converted(self.model).values(), self._first
        if before is not None:
            before.close()
        forget(layers, but=lambda hook: hook is not before)
        if self.config.undecided and not layers:  # no product is there to quantize
            self._take(self.config.decided(saves=True))
        elif self.config.undecided:
            self._first = FirstTraining(self.model, self.config, self._take)
            for layer in layers:
                layer.register_forward_pre_hook(self._first)

    def _take(self, config: DSQConfig) -> None:
        """Go on with the levels that were decided."""
        self.config, self.scheduler.levels = config, config.levels

    def _set_level(self, rose: bool) -> bool:
        if rose:
            set_level(self.model, self.config, self.scheduler.level)
            _LOG.info("update %d: rose to %s", self.scheduler.updates, self.scheduler.precision)
        return rose


def _refuse_second(model: nn.Module, config: DSQConfig) -> None:
    """Raise ValueError if ``model``, or a part of it, has another DynamicPrecision with another config."""
    converted_modules = (module for module in model.modules() if module in _SCHEDULES and is_converted(module))
    for dynamic in (dynamic for module in converted_modules for dynamic in _SCHEDULES[module]):
        first, second = dynamic.config.as_dict(), config.as_dict()
        if config.undecided and dynamic.config.levels in (DEFAULT_LEVELS, SAVING_LEVELS):
            second["levels"] = first["levels"]
        if differing := ", ".join(f"{name}={first[name]!r}" for name in first if first[name] != second[name]):
            text = f"config must be that of the DynamicPrecision which the model has, with {differing}"
            raise ValueError(f"{text}; or call dsq.unconvert(model) first")


def stash_mib(model: nn.Module) -> dict[str, float]:
    """Return "stash_mib", saved by the latest forward under the model's stash policies; empty for a compiled one."""
    saved_bytes = sum(policy.report().saved_bytes for policy in applied(model).values())
    return {"stash_mib": saved_bytes / 2**20} if saved_bytes else {}


def convert_at(model: nn.Module, state: dict[str, Any]) -> None:
    """Convert ``model`` in place for evaluation, with the config and at the level of a DynamicPrecision's ``state``.

    Raises ValueError if ``state`` is no such state, or ``model`` was converted with other options.
    """
    config, scheduler = _config(state), state["scheduler"]
    _convert(model, config, "the state's config")
    level: Any = scheduler.get("level") if isinstance(scheduler, dict) else None
    set_level(model, config, level)


def _config(state: dict[str, Any]) -> DSQConfig:
    check_keys("state", state, ("config", "scheduler"), optional=(_WATCHES,))
    return DSQConfig.from_dict(state["config"])


def _convert(model: nn.Module, config: DSQConfig, of: str = "config") -> None:
    parts = converted_parts(model)
    if is_converted(model):
        check_conversion(model, config, of)
    for part in parts:
        unconvert(part)
    if parts or not is_converted(model):
        convert(model, config)
        text = "converted %d layers to %s, stash=%r; print(dsq.report(model, batch)) lists the skipped modules"
        _LOG.info(text, len(converted(model)), config.levels[0], config.stash)
