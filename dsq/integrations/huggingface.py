"""A callback for Hugging Face's Trainer and its subclasses (TRL's), and the config in config.json.

    trainer = Trainer(model, args, ..., callbacks=[PrecisionCallback()])

This trains as ``dsq.DynamicPrecision(model)`` does; ``PrecisionCallback("[4,3,3,8] [8,4,4,8]", rise_at=0.8)`` has a
schedule.
The model is converted when training begins, the scheduler gets the ``eval_loss`` of every evaluation, and checkpoints
hold the level, so ``trainer.train(resume_from_checkpoint=True)`` resumes at it. The config.json of a saved model holds
its precision:

    model = restore(AutoModelForCausalLM.from_pretrained(folder))
"""

import sys
import warnings
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from dsq.config import DSQConfig
from dsq.conversion import convert, is_converted
from dsq.dynamic import DynamicPrecision, convert_at
from dsq.stash.controller import applied
from dsq.stash.graphs.compiled import inductor_options

Model = TypeVar("Model", bound=nn.Module)
#: the key of config.json
_KEY = "dsq"


def restore(model: Model) -> Model:
    """Convert ``model`` in place as ``PrecisionCallback`` did before ``save_pretrained``, at the level in config.json.

    Returns ``model``. Raises ValueError if its config.json has no such entry.
    """
    saved = getattr(getattr(model, "config", None), _KEY, None)
    if saved is None:
        raise ValueError(f"config.json of the model has no {_KEY!r}, which PrecisionCallback writes: use dsq.convert")
    convert_at(model, saved)
    return model


class PrecisionCallback(TrainerCallback, ExportableState):
    """Convert the model, raise its precision by its schedule, and log ``DynamicPrecision.metrics`` in every logger.

    Args:
        config: as in ``DSQConfig.of``.
        **options: as in ``DSQConfig.of``.
        monitor: the name of the evaluation loss, "eval_NAME_loss" if there are several sets.
    """

    def __init__(
        self, config: DSQConfig | str | dict[str, Any] | None = None, monitor: str = "eval_loss", **options: Any
    ) -> None:
        self.config = DSQConfig.of(config, **options)
        self.dynamic: DynamicPrecision | None = None  #: set when training begins
        self.monitor = monitor
        self._mode: str | None = None  #: of the compiler, as the trainer's arguments have it
        self._packed: Any = None  #: a weak reference to the model whose graphs pack
        self._training = False
        self._other_losses = set[str]()  # losses of other sets since the latest monitored loss

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert a model that the trainer compiles before ``on_train_begin``, so that its graphs have the policies."""
        if not args.torch_compile:
            return
        model = kwargs["model"]
        if isinstance(model, PreTrainedModel):
            model.loss_function = model.loss_function  # GPT-2's warns at each call, which breaks the graph
        if not is_converted(model):
            convert(model, self.config)
        if self.config.stash == "all":
            self._mode, self._packed = _pack_in_graphs(model), ref(model)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert the model, at the level of the checkpoint that the trainer resumes from.

        Warns if the level follows evaluations and there will be none. Raises ValueError if the model was compiled
        before a policy could be applied.
        """
        _stand_before_loggers(self)
        if self._mode:  # another trainer may have the same arguments
            plugin = _compiler()
            plugin.mode, plugin.options, self._mode = self._mode, None, None
            if self._packed() is not kwargs["model"]:
                warnings.warn("torch_compile: what graphs of a model of model_init save stays exact", stacklevel=2)
        if args.torch_compile and self.config.stash == "all" and not is_converted(kwargs["model"]):
            text = "torch_compile came first: give Trainer(callbacks=...) the callback, not add_callback"
            raise ValueError(f"{text}; and let model_init return dsq.convert(model, callback.config)")
        self.dynamic = DynamicPrecision(kwargs["model"], self.config, state.max_steps)
        saved = self.saved_in(state)
        if saved and state.global_step:  # at 0 it comes from an earlier train(), not from a checkpoint
            self.dynamic.load_state_dict(saved)
        if self.config.follows_validation and args.eval_strategy == "no":
            text = "the level cannot rise without evaluations: set eval_strategy, or give the callback rise_at"
            warnings.warn(text, stacklevel=2)
            self.dynamic.waiting.over = True
        # the Trainer cannot save the state of a callback that is missing in its checkpoint
        callbacks: Any = state.stateful_callbacks
        callbacks.setdefault(type(self).__name__, self.state())
        self.dynamic.began_after(state.global_step)
        self._write_config()
        self._training = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.dynamic is not None
        self.dynamic.record(updates=1)
        self._write_config()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the evaluation's loss, in training. Raises ValueError if no evaluation logs it."""
        metrics: dict[str, float] = kwargs["metrics"]
        if not self._training or not any(name.startswith("eval_") for name in metrics):
            return  # of the user, before or after training or with another prefix
        if self.monitor in metrics:
            assert self.dynamic is not None
            self.dynamic.step(metrics[self.monitor])
            self._write_config()
            self._other_losses.clear()
            return
        if not self.config.follows_validation:
            return
        losses = {name for name in metrics if name.endswith("loss")}
        if losses <= self._other_losses:
            accepted = ", ".join(map(repr, sorted(losses))) or "none was logged"
            raise ValueError(f"monitor must be an evaluation's loss ({accepted}), got {self.monitor!r}")
        self._other_losses |= losses

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """If the trainer restored its best checkpoint, restore that checkpoint's level."""
        self._training = False
        if not args.load_best_model_at_end or state.best_model_checkpoint is None:
            return
        assert self.dynamic is not None
        best = TrainerState.load_from_json(f"{state.best_model_checkpoint}/{TRAINER_STATE_NAME}")
        if saved := self.saved_in(best):  # else the checkpoint is of a run without the callback
            convert_at(self.dynamic.model, saved)
            self._write_config(saved)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add ``DynamicPrecision.metrics`` to the logged figures."""
        if self.dynamic is not None:
            metrics = self.dynamic.metrics()
            kwargs["logs"].update(metrics)
            state.log_history[-1].update(metrics)

    def state(self) -> dict[str, Any]:
        """Return the callback's entry in the trainer's checkpoints."""
        attributes = {"saved": self.dynamic.state_dict() if self.dynamic else None}
        return {"args": {"config": self.config.as_dict(), "monitor": self.monitor}, "attributes": attributes}

    def saved_in(self, state: TrainerState) -> Any:
        """Return the DynamicPrecision's state in the checkpoint of ``state``; None if it has none."""
        callbacks: Any = state.stateful_callbacks  # a list before training, a dict of what they saved in it
        return callbacks.get(type(self).__name__, {}).get("attributes", {}).get("saved")

    def _write_config(self, state: dict[str, Any] | None = None) -> None:
        """Write the schedule's present state, or ``state``, into the model's config.json."""
        assert self.dynamic is not None
        config = getattr(self.dynamic.model, "config", None)
        if config is not None:
            setattr(config, _KEY, state or self.dynamic.state_dict())


def _compiler() -> Any:
    """Return accelerate's settings of torch.compile, which the trainers of one set of arguments share."""
    from accelerate.state import AcceleratorState  # which the Trainer needs, and restore does not

    return AcceleratorState().dynamo_plugin


def _pack_in_graphs(model: nn.Module) -> str | None:
    """Let the graph of ``model``, which the trainer compiles next by accelerate, pack what it saves. Return the
    compiler's mode before; None if nothing changed."""
    plugin = _compiler()
    if plugin.backend.value.lower() != "inductor" or plugin.options or "bfp" not in applied(model):
        return None
    mode: str = plugin.mode  # PyTorch takes it or options
    of_mode = {} if mode == "default" else torch._inductor.list_mode_options(mode, plugin.dynamic)
    plugin.mode, plugin.options = "default", of_mode | inductor_options(model)
    return mode


def _stand_before_loggers(callback: PrecisionCallback) -> None:
    """Move ``callback`` to the front of its trainer's list, so that loggers after it see the figures that it adds.

    A trainer does not pass that list to its callbacks, so it is taken from the frame that calls them.
    """
    handler = sys._getframe(2).f_locals.get("self")
    callbacks = getattr(handler, "callbacks", None)
    if isinstance(callbacks, list) and callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
