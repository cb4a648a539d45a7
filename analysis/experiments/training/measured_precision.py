"""Hugging Face's callback, which measures the stash too, as the fairseq plugin does."""

import dataclasses
from contextlib import ExitStack
from typing import Any

from dsq.integrations.huggingface import PrecisionCallback
from fairseq_plugin.run import stash


class MeasuredPrecision(PrecisionCallback):
    """Measures a training step of every ``stash.EVERY``, at each level; a resumed run goes on with the sums."""

    def __init__(self, levels: str, **options: Any) -> None:
        super().__init__(levels, **options)
        self.stash = [stash.Measured() for _ in self.config.levels]
        self._step = ExitStack()

    def history(self) -> dict[str, Any]:
        """What results.json has of the schedule."""
        assert self.dynamic is not None
        return self.config.as_dict() | {"levels": stash.history(self.dynamic.scheduler, self.stash)}

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        super().on_train_begin(args, state, control, **kwargs)
        if saved := self.saved_in(state, "stash"):
            self.stash = [stash.Measured(**found) for found in saved]

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        assert self.dynamic is not None
        self._step.enter_context(stash.sampled(self.stash, self.dynamic.scheduler, kwargs["model"]))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._step.close()
        super().on_step_end(args, state, control, **kwargs)

    def state(self) -> dict[str, Any]:
        state = super().state()
        state["attributes"]["stash"] = [dataclasses.asdict(found) for found in self.stash]
        return state
