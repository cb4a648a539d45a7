"""What a checkpoint carries of a DSQ run, in a submodule of the model: all else is not restored everywhere.

fairseq saves the task's state but never restores it on resume; the model's state dict it restores on resume, on
generation and on fine-tuning. The state is Python data (get_extra_state): buffers would be halved by --fp16.
"""

import dataclasses
import sys
from typing import Any

from torch import nn

import dsq
from dsq.precision import levels_text, parse_levels
from fairseq_plugin.flags import InputError, flag_of, quiet
from fairseq_plugin.run.stash import Measured

#: the name of the submodule, and of its entry in a state dict
NAME = "dsq"
KEY = f"{NAME}._extra_state"

#: options that a resumed run may change: they say when the next level comes, not what was computed so far
_FREE = {"patience", "threshold", "rise_at", "eval_full_precision"}


class DSQState(nn.Module):
    """The schedule of a run, the work and the stash at each level, and every validation loss. No parameters."""

    def __init__(self, config: dsq.DSQConfig) -> None:
        super().__init__()
        self.config = config
        #: as of a run without end, in which no fraction comes to pass, until ``set_total_updates``
        self.scheduler = quiet(config.scheduler, sys.maxsize)
        self.trained_level = 0  #: that of the last update: a checkpoint may already hold the level of the next
        self.stash = [Measured() for _ in config.levels]
        self.validations: list[dict[str, Any]] = []  #: update, level and loss of each validation

    def set_total_updates(self, total: int) -> None:
        """Turn rises in fractions of the run into updates. ``total``: of the run with DSQ; 0: nothing bounds it.

        Raises InputError for fractions of a run that nothing bounds.
        """
        if not any(moment < 1 for moment in self.config.rise_at):
            return
        if not total:
            moments = ", ".join(map(str, self.config.rise_at))
            raise InputError(
                f"--dsq-rise-at {moments}: must be updates where --max-update and --max-epoch are absent; "
                "with data in several folders, whose epochs differ, give --max-update"
            )
        self.scheduler.rise_at = quiet(self.config.scheduler, total).rise_at
        self.config = quiet(dataclasses.replace, self.config, rise_at=self.scheduler.rise_at)

    def record(self, tokens: int) -> bool:
        """Take note of one update; True if the level rises with it."""
        self.trained_level = self.scheduler.level
        return self.scheduler.record(1, tokens)

    def validated(self, update: int, loss: float) -> bool:
        """Take note of a validation loss; True if the level rose."""
        self.validations.append({"update": update, "level": self.scheduler.level, "loss": loss})
        return self.scheduler.step(loss)

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "config": self.config.as_dict(),
            "scheduler": self.scheduler.state_dict(),
            "trained_level": self.trained_level,
            "stash": [dataclasses.asdict(measured) for measured in self.stash],
            "validations": list(self.validations),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.scheduler.load_state_dict(state["scheduler"])
        self.trained_level = state["trained_level"]
        self.stash = [Measured(**measured or {}) for measured in state["stash"]]
        self.validations = list(state["validations"])


def check_same(config: dsq.DSQConfig, saved: dict[str, Any]) -> None:
    """Raises InputError where a run with ``config`` cannot go on from a checkpoint whose config is ``saved``."""
    theirs = dsq.DSQConfig.from_dict(saved).as_dict()
    for name, value in config.as_dict().items():
        if name not in _FREE and value != theirs[name]:
            raise InputError(
                f"{flag_of(name)} {_shown(value)} differs from the checkpoint's {_shown(theirs[name])}: "
                "give the checkpoint's, another --save-dir, or --dsq-reset to begin with them anew"
            )


def _shown(value: Any) -> str:
    return f'"{levels_text(parse_levels(value))}"' if isinstance(value, list) else repr(value)
