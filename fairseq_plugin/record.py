"""The record of a DSQ run: dsq_history.json in --save-dir, and dsq_workload.json, the model that it trained."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

import dsq.workload
from dsq.command import write_text
from fairseq_plugin.flags import InputError
from fairseq_plugin.state import DSQState

FILE = "dsq_history.json"
WORKLOAD = "dsq_workload.json"


def history(state: DSQState) -> dict[str, Any]:
    """The run so far, as data for JSON.

    ``levels`` has for each level its precision, updates and tokens; ``validations`` the update, level and loss of each
    one.
    """
    config = state.config.as_dict()
    del config["levels"]
    levels = state.scheduler.history()["levels"]
    return {
        **config,
        "level": state.scheduler.level,
        "updates": sum(level["updates"] for level in levels),
        "tokens": sum(level["tokens"] for level in levels),
        "levels": levels,
        "validations": [
            {**one, "loss": one["loss"] if math.isfinite(one["loss"]) else None} for one in state.validations
        ],
    }


def write_history(state: DSQState, folder: str) -> None:
    """Write the record of ``state`` to ``folder``; only the first worker does."""
    described = (Path(folder) / WORKLOAD).exists()
    _write(Path(folder) / FILE, {**history(state), "workload": WORKLOAD if described else None})


def write_workload(model: nn.Module, folder: str, *inputs: Any, **keywords: Any) -> dict[str, Any]:
    """Describe a training step ``model(*inputs, **keywords)`` for ``dsq-cost``; the run stays what it is without."""
    weights = [(parameter, parameter.data) for parameter in model.parameters()]
    with torch.random.fork_rng():
        workload = dsq.workload.trace(model, *inputs, **keywords)
    for parameter, data in weights:  # a forward with --quant-noise-pq replaces them
        parameter.data = data
    _write(Path(folder) / WORKLOAD, workload)
    return workload


def _write(path: Path, data: dict[str, Any]) -> None:
    if distributed.is_available() and distributed.is_initialized() and distributed.get_rank() != 0:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps(data, indent=1) + "\n")
    except (OSError, ValueError) as error:
        raise InputError(f"--save-dir: {error}; make room, then give the same command again") from error
