"""The record of a DSQ run: dsq_history.json in --save-dir."""

import json
import math
from pathlib import Path
from typing import Any

from torch import distributed

from dsq.command.files import write_text
from fairseq_plugin.state import DSQState

FILE = "dsq_history.json"


def history(state: DSQState) -> dict[str, Any]:
    """The run so far, as data for JSON.

    ``levels`` has for each level its precision, updates and tokens (by which ``dsq-cost estimate --history`` weighs its
    mean) and the stash measured in its first training step; ``validations`` the update, level and loss of each one.
    """
    config = state.config.as_dict()
    del config["levels"]
    levels = state.scheduler.history()["levels"]
    return {
        **config,
        "level": state.scheduler.level,
        "updates": sum(level["updates"] for level in levels),
        "tokens": sum(level["tokens"] for level in levels),
        "levels": [{**level, **(stash or {})} for level, stash in zip(levels, state.stash, strict=True)],
        "validations": [
            {**one, "loss": one["loss"] if math.isfinite(one["loss"]) else None} for one in state.validations
        ],
    }


def write_history(state: DSQState, folder: str) -> None:
    """Write the record of ``state`` to ``folder``, whole or not at all; only the first worker does."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0:
        return
    path = Path(folder) / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(history(state), indent=1) + "\n")
