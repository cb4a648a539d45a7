"""A callback for Lightning.

    trainer = lightning.Trainer(..., callbacks=[PrecisionCallback()])

This trains as ``dsq.DynamicPrecision(model)`` does; ``PrecisionCallback("[4,3,3,8] [8,4,4,8]", rise_at=0.8)`` has a
schedule.
The module is converted when fitting is set up, the scheduler gets the monitored loss of each validation, and
checkpoints hold the level, so ``trainer.fit(module, ckpt_path="last")`` resumes at it.

Under manual optimization a batch is an update, however many optimizers step in it. If ``max_steps`` bounds the run,
each optimizer's step is one, as Lightning counts them.

If ModelCheckpoint saves every N steps and a validation falls on one of them, Lightning saves before it validates. A
resumed run does not validate there again, so that loss is lost. Save at the end of validations, the default, or between
them.
"""

import warnings
from functools import partial, wraps
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from dsq.config import DSQConfig
from dsq.dynamic import DynamicPrecision, convert_at
from dsq.stash.controller import under_policies


class PrecisionCallback(Callback):
    """Convert the module, raise its precision by its schedule, and log ``DynamicPrecision.metrics`` in every logger.

    Args:
        config: as in ``DSQConfig.of``.
        **options: as in ``DSQConfig.of``.
        monitor: the name under which the module logs the validation loss.
    """

    def __init__(self, config: DSQConfig | str | None = None, monitor: str = "val_loss", **options: Any) -> None:
        self.config = DSQConfig.of(config, **options)
        self.monitor = monitor
        self.dynamic: DynamicPrecision | None = None  #: set by ``setup``
        self._saved: dict[str, Any] = {}
        self._former_step: Any = None  #: the module's training step if it is an attribute, such as a compiled one
        self._updates = 0  #: of the run, as ``_updates_of`` counts them
        self._by_batch = False  #: whether a batch is an update, and not the step of an optimizer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Convert the module, before it is wrapped or sharded."""
        if stage == "fit" and (self.dynamic is None or self.dynamic.model is not pl_module):
            updates = trainer.estimated_stepping_batches if self.config.rise_at else None
            self.dynamic = DynamicPrecision(pl_module, self.config, updates if isinstance(updates, int) else None)
            self._saved = {}  # from a checkpoint of another module
            # the unit of estimated_stepping_batches, in which fractions of rise_at are
            self._by_batch = not pl_module.automatic_optimization and updates != trainer.max_steps

        if stage == "fit":  # a policy acts in calls of the module, but Lightning calls its training step
            compiled = pl_module._compiler_ctx or {}
            step: Any = compiled.get("original_training_step", pl_module.training_step)
            detour = wraps(step)(partial(under_policies, pl_module, step))
            self._former_step = vars(pl_module).get("training_step")
            # wrapped once only, because Lightning reads the parameters of the wrapped step
            vars(pl_module)["training_step"] = wraps(step)(compiled["dynamo_ctx"](detour)) if compiled else detour

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Restore the training step."""
        if stage == "fit":
            vars(pl_module).pop("training_step", None)
            if self._former_step is not None:
                vars(pl_module)["training_step"] = self._former_step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the level of the checkpoint. Warns if the level follows validations and there will be none."""
        assert self.dynamic is not None
        if self._saved:
            self.dynamic.load_state_dict(self._saved)
            self._saved = {}
        if self.config.follows_validation and not trainer.enable_validation:
            text = "the level cannot rise without validations: give fit a val_dataloader, or DSQConfig(rise_at=...)"
            warnings.warn(text, stacklevel=2)
            self.dynamic.waiting.over = True
        self._updates = self._updates_of(trainer)
        self.dynamic.began_after(self._updates)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set the level of the checkpoint for validation, test or prediction; convert the module if needed."""
        if self._saved:
            convert_at(pl_module, self._saved)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.dynamic is not None
        updates = self._updates_of(trainer)
        self.dynamic.record(updates - self._updates)  # 0 where gradients are accumulated
        self._updates = updates
        pl_module.log_dict(self.dynamic.metrics())

    def _updates_of(self, trainer: Trainer) -> int:
        """Return the number of updates that the run has made."""
        return trainer.fit_loop.total_batch_idx + 1 if self._by_batch else trainer.global_step

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record the loss, in training. Raises ValueError if the module does not log it."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or self.dynamic is None:
            return
        loss = trainer.callback_metrics.get(self.monitor)
        if loss is not None:
            self.dynamic.step(loss)
        elif self.config.follows_validation:
            logged = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(f"monitor must be a value that the module logs ({logged}), got {self.monitor!r}")

    def state_dict(self) -> dict[str, Any]:
        """Return the callback's entry in Lightning's checkpoints."""
        return self.dynamic.state_dict() if self.dynamic else self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state until training starts."""
        self._saved = state_dict
