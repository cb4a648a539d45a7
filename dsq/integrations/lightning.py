"""Lightning: dynamic stashing quantization as a callback.

    trainer = lightning.Trainer(..., callbacks=[PrecisionCallback()])

That is [8,4,8,8] with stash="all"; ``PrecisionCallback("[4,3,3,8] [8,4,4,8]", rise_at=0.8)`` has a schedule.
The module is converted when fitting is set up, the monitored loss of each validation goes to the scheduler, and the
level is in the checkpoints: ``trainer.fit(module, ckpt_path="last")`` goes on where it was.

Where ModelCheckpoint saves every N steps and N falls on a validation, Lightning saves first and does not validate again
when it resumes: that loss is lost. Save at the end of the validation, which is its default, or between validations.
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
    """Convert the module, raise its precision as its config says, log ``DynamicPrecision.metrics`` in every logger.

    ``config`` and ``options`` are those of ``DSQConfig.of``. ``monitor``: the validation loss, as the module logs it.
    """

    def __init__(self, config: DSQConfig | str | None = None, monitor: str = "val_loss", **options: Any) -> None:
        self.config = DSQConfig.of(config, **options)
        self.monitor = monitor
        self.dynamic: DynamicPrecision | None = None  #: from the set-up on
        self._saved: dict[str, Any] = {}
        self._step: Any = None  #: the module's own training step, where it is an attribute: compiled, say
        self._updates = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Convert the module, before it is wrapped or sharded."""
        if stage == "fit" and (self.dynamic is None or self.dynamic.model is not pl_module):
            updates = trainer.estimated_stepping_batches if self.config.rise_at else None
            self.dynamic = DynamicPrecision(pl_module, self.config, updates if isinstance(updates, int) else None)
            self._saved = {}  # of a checkpoint that another module was tested with

        if stage == "fit":  # a policy acts on calls of the module; Lightning calls its training step
            compiled = pl_module._compiler_ctx or {}
            step: Any = compiled.get("original_training_step", pl_module.training_step)
            detour = wraps(step)(partial(under_policies, pl_module, step))
            self._step = vars(pl_module).get("training_step")
            # Lightning reads the step's parameters from what is wrapped once
            vars(pl_module)["training_step"] = wraps(step)(compiled["dynamo_ctx"](detour)) if compiled else detour

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take the detour of the training step away again."""
        if stage == "fit":
            vars(pl_module).pop("training_step", None)
            if self._step is not None:
                vars(pl_module)["training_step"] = self._step

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the level of the checkpoint. Warns where the level follows validations and there will be none."""
        assert self.dynamic is not None
        if self.config.follows_validation and not trainer.enable_validation:
            text = "the level cannot rise without validations: give fit a val_dataloader, or DSQConfig(rise_at=...)"
            warnings.warn(text, stacklevel=2)
        if self._saved:
            self.dynamic.load_state_dict(self._saved)
            self._saved = {}
        self.dynamic.began_after(trainer.global_step)
        self._updates = trainer.global_step

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the level of the checkpoint that is validated, tested or predicts; convert the module if it is not."""
        if self._saved:
            convert_at(pl_module, self._saved)

    on_test_start = on_predict_start = on_validation_start

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self.dynamic is not None
        self.dynamic.record(updates=trainer.global_step - self._updates)  # 0 where gradients are accumulated
        self._updates = trainer.global_step
        pl_module.log_dict(self.dynamic.metrics())

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take note of the loss, in training. Raises ValueError where the module does not log it."""
        if trainer.sanity_checking or trainer.state.fn != "fit" or self.dynamic is None:
            return
        loss = trainer.callback_metrics.get(self.monitor)
        if loss is not None:
            self.dynamic.step(loss)
        elif self.config.follows_validation:
            logged = ", ".join(sorted(trainer.callback_metrics))
            raise ValueError(f"monitor must be a value the module logs, {self.monitor!r} is not among {logged}")

    def state_dict(self) -> dict[str, Any]:
        """Return what Lightning writes into its checkpoints."""
        return self.dynamic.state_dict() if self.dynamic else self._saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep it until training starts."""
        self._saved = state_dict
