"""Hugging Face's Trainer, and those made of it (TRL's): a callback, and the config in config.json.

    trainer = Trainer(model, args, ..., callbacks=[PrecisionCallback()])

That is [8,4,8,8] with stash="all"; ``PrecisionCallback("[4,3,3,8] [8,4,4,8]", rise_at=0.8)`` has a schedule.
The model is converted when training begins, every evaluation's ``eval_loss`` goes to the scheduler, and the level is in
the checkpoints: ``trainer.train(resume_from_checkpoint=True)`` goes on where it was. A saved model says in config.json
how it was trained:

    model = restore(AutoModelForCausalLM.from_pretrained(folder))
"""

import sys
import warnings
from typing import Any, TypeVar

from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_callback import ExportableState, TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from dsq.config import DSQConfig
from dsq.conversion import convert, is_converted
from dsq.dynamic import DynamicPrecision, convert_at

Model = TypeVar("Model", bound=nn.Module)
#: the key of config.json
_KEY = "dsq"


def restore(model: Model) -> Model:
    """Convert ``model``, in place, as the one was that ``PrecisionCallback`` trained and ``save_pretrained`` saved, at
    the level it had reached. Returns it. Raises ValueError where its config.json does not say how.
    """
    saved = getattr(getattr(model, "config", None), _KEY, None)
    if saved is None:
        raise ValueError(f"config.json of the model has no {_KEY!r}: PrecisionCallback writes it; use dsq.convert")
    convert_at(model, saved)
    return model


class PrecisionCallback(TrainerCallback, ExportableState):
    """Convert the model, raise its precision as its config says, log ``DynamicPrecision.metrics`` in every logger.

    ``config`` and ``options`` are those of ``DSQConfig.of``. ``monitor``: the evaluation loss, "eval_NAME_loss" where
    there are several sets.
    """

    def __init__(
        self, config: DSQConfig | str | dict[str, Any] | None = None, monitor: str = "eval_loss", **options: Any
    ) -> None:
        self.config = DSQConfig.of(config, **options)
        self.dynamic: DynamicPrecision | None = None  #: from the beginning of the training on
        self.monitor = monitor
        self._training = False
        self._others = set[str]()  # losses of other sets since the monitored one

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Convert a model that the trainer will compile before ``on_train_begin``: graphs know policies made before."""
        if not args.torch_compile:
            return
        model = kwargs["model"]
        if isinstance(model, PreTrainedModel):
            model.loss_function = model.loss_function  # GPT-2's warns in each call, where a graph breaks
        if not is_converted(model):
            convert(model, self.config)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert the model, at the level of the checkpoint that the trainer resumes from.

        Warns where the level follows evaluations and there will be none. Raises ValueError where a policy would come
        to a model that is compiled.
        """
        _stand_before_loggers(self)
        if args.torch_compile and self.config.stash == "all" and not is_converted(kwargs["model"]):
            text = "torch_compile came first: give Trainer(callbacks=...) the callback, not add_callback"
            raise ValueError(f"{text}; and let model_init return dsq.convert(model, callback.config)")
        if self.config.follows_validation and args.eval_strategy == "no":
            text = "the level cannot rise without evaluations: set eval_strategy, or give the callback rise_at"
            warnings.warn(text, stacklevel=2)
        self.dynamic = DynamicPrecision(kwargs["model"], self.config, state.max_steps)
        saved = self.saved_in(state)
        if saved and state.global_step:  # at 0 it is of an earlier train(), not of a checkpoint
            self.dynamic.load_state_dict(saved)
        # the Trainer cannot save the state of a callback that its checkpoint did not know
        callbacks: Any = state.stateful_callbacks
        callbacks.setdefault(type(self).__name__, self.state())
        self.dynamic.began_after(state.global_step)
        self._note()
        self._training = True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.dynamic is not None
        self.dynamic.record(updates=1)
        self._note()

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Take note of the evaluation's loss, in training. Raises ValueError where no evaluation gives it."""
        metrics: dict[str, float] = kwargs["metrics"]
        if not self._training or not any(name.startswith("eval_") for name in metrics):
            return  # the user's own: before or after training, or under another prefix
        if self.monitor in metrics:
            assert self.dynamic is not None
            self.dynamic.step(metrics[self.monitor])
            self._note()
            self._others.clear()
            return
        if not self.config.follows_validation:
            return
        losses = {name for name in metrics if name.endswith("loss")}
        if losses <= self._others:
            there = ", ".join(map(repr, sorted(losses))) or "nothing"
            raise ValueError(f"monitor must be an evaluation's loss, got {self.monitor!r} where there is {there}")
        self._others |= losses

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Where the trainer went back to its best checkpoint, go back to the level of that."""
        self._training = False
        if not args.load_best_model_at_end or state.best_model_checkpoint is None:
            return
        assert self.dynamic is not None
        best = TrainerState.load_from_json(f"{state.best_model_checkpoint}/{TRAINER_STATE_NAME}")
        if saved := self.saved_in(best):  # else it is of a run without the callback
            convert_at(self.dynamic.model, saved)
            self._note(saved)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add ``DynamicPrecision.metrics`` to what is logged."""
        if self.dynamic is not None:
            metrics = self.dynamic.metrics()
            kwargs["logs"].update(metrics)
            state.log_history[-1].update(metrics)

    def state(self) -> dict[str, Any]:
        """Return what the trainer writes into its checkpoints."""
        attributes = {"saved": self.dynamic.state_dict() if self.dynamic else None}
        return {"args": {"config": self.config.as_dict(), "monitor": self.monitor}, "attributes": attributes}

    def saved_in(self, state: TrainerState) -> Any:
        """Return the precision that the callback wrote into the checkpoint that ``state`` is of; None without."""
        callbacks: Any = state.stateful_callbacks  # a list before training, a dict of what they saved in it
        return callbacks.get(type(self).__name__, {}).get("attributes", {}).get("saved")

    def _note(self, state: dict[str, Any] | None = None) -> None:
        """Let config.json say where the schedule stands, or stood."""
        assert self.dynamic is not None
        config = getattr(self.dynamic.model, "config", None)
        if config is not None:
            setattr(config, _KEY, state or self.dynamic.state_dict())


def _stand_before_loggers(callback: PrecisionCallback) -> None:
    """Put ``callback`` first in the list that its trainer is going through: loggers behind it see what it adds.

    A trainer gives its callbacks everything but that list, so it is taken from the frame that calls them.
    """
    handler = sys._getframe(2).f_locals.get("self")
    callbacks = getattr(handler, "callbacks", None)
    if isinstance(callbacks, list) and callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
