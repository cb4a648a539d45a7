"""Hugging Face's Trainer: dynamic stashing quantization as a callback.

    trainer = Trainer(model, args, ..., callbacks=[PrecisionCallback(levels="[4,4,4,16] [16,4,4,16]")])

The model is converted when training begins, every evaluation's ``eval_loss`` goes to the scheduler, and the level is in
the checkpoints: ``trainer.train(resume_from_checkpoint=True)`` goes on where it was.
"""

from typing import Any

from torch import nn
from transformers.trainer_callback import (
    ExportableState,
    TrainerCallback,
    TrainerControl,
    TrainerState,
)
from transformers.training_args import TrainingArguments

from dsq.config import DSQConfig
from dsq.conversion import convert, converted, set_level
from dsq.precision import parse_levels
from dsq.scheduler import PrecisionScheduler


class PrecisionCallback(TrainerCallback, ExportableState):
    """Converts the model and raises its precision at a plateau of the evaluation loss.

    Args:
        levels: the schedule as text, "[4,4,4,16] [16,4,4,16]".
        options: the other fields of DSQConfig, as plain values.
    Raises:
        ValueError: as DSQConfig does.
    """

    def __init__(self, levels: str = "[4,4,4,16] [16,4,4,16]", **options: Any) -> None:
        self.config = DSQConfig(levels=parse_levels(levels), **options)
        self.scheduler: PrecisionScheduler | None = None  #: from the beginning of the training on
        self._args = {"levels": levels, **options}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Convert the model, at the level of the checkpoint that the trainer resumes from."""
        model: nn.Module = kwargs["model"]
        callbacks: Any = state.stateful_callbacks  # a list before training, a dict of what they saved in it
        self.scheduler = self.config.scheduler(state.max_steps)
        saved = callbacks.get(type(self).__name__, {}).get("attributes", {}).get("saved")
        if saved:
            self.scheduler.load_state_dict(saved)
        if not converted(model):
            convert(model, self.config)
        set_level(model, self.config, self.scheduler.level)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        assert self.scheduler is not None
        if self.scheduler.record(updates=1):
            set_level(kwargs["model"], self.config, self.scheduler.level)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Take note of the evaluation's loss. Raises ValueError where the evaluation gave none."""
        metrics: dict[str, float] = kwargs["metrics"]
        if "eval_loss" not in metrics:
            raise ValueError(f"the evaluation must give eval_loss for the level to follow, got {sorted(metrics)}")
        assert self.scheduler is not None
        if self.scheduler.step(metrics["eval_loss"]):
            set_level(kwargs["model"], self.config, self.scheduler.level)

    def state(self) -> dict[str, Any]:
        """What the trainer writes into its checkpoints."""
        return {"args": self._args, "attributes": {"saved": self.scheduler.state_dict() if self.scheduler else None}}
