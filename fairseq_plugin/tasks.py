"""Add DSQ to a fairseq task: convert its model, step the schedule, and record the run.

fairseq builds the model through the task in training and in generation alike (sentence_prediction adds its
classification head there), and calls it at each update and each validation.
"""

import inspect
import json
import logging
import math
from pathlib import Path
from typing import Any

import torch
from fairseq.logging import metrics
from fairseq.tasks import FairseqTask
from torch import distributed, nn

import dsq
from dsq.command import write_text
from dsq.costmodel import predicted
from dsq.dynamic import stash_mib
from dsq.precision import levels_text
from fairseq_plugin.flags import InputError, config_of
from fairseq_plugin.loss_in_chunks import FEATURES_ONLY, in_chunks
from fairseq_plugin.state import DSQState, prepare, state_of

logger = logging.getLogger(__name__)
FILE = "dsq_history.json"  #: the record of a run, in --save-dir
WORKLOAD = "dsq_workload.json"  #: the model that it trained


def _refuse_quant_noise(model: nn.Module) -> None:
    """Raise InputError if a forward of ``model`` drops blocks of its weights for good, as --quant-noise-pq does.

    fairseq's attention hands the weights of its projections to PyTorch's function, past the hooks that drop, and DSQ
    calls the projections; the forward that describes the model drops blocks too. So training would differ at any level.
    """
    hooks = (hook for module in model.modules() for hook in module._forward_pre_hooks.values())
    if any(getattr(hook, "__module__", "") == "fairseq.modules.quant_noise" for hook in hooks):
        text = "its noise stays in the weights, and reaches other layers where DSQ calls them"
        raise InputError(f"--quant-noise-pq does not go with --dsq-levels: {text}; leave one of them out")


class DSQTask(FairseqTask):
    """Adds DSQ to a task, and nothing without --dsq-levels. Stands before the task's own class."""

    dsq_config: dsq.DSQConfig | None = None
    dsq_reset = False  #: ignore the DSQ state of the run's checkpoint
    dsq_save_dir = ""
    dsq_updates = 0  #: updates of the run with DSQ; 0: unbounded
    dsq_state: DSQState | None = None
    _dsq_model: Any
    _validation_is_new = False
    _described = False

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> FairseqTask:
        config = config_of(cfg)
        task = super().setup_task(cfg, **kwargs)
        task.dsq_config = config
        task.dsq_reset = getattr(cfg, "dsq_reset", False)
        # a model with argparse's options has one namespace with save_dir; a task's config has DSQFlags' dsq_save_dir
        task.dsq_save_dir = getattr(cfg, "dsq_save_dir", None) or getattr(cfg, "save_dir", "")
        return task

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        build = super().build_model
        has_parameter = "from_checkpoint" in inspect.signature(build).parameters
        model = build(cfg, from_checkpoint) if has_parameter else build(cfg)
        if self.dsq_config is not None:
            _refuse_quant_noise(model)
        prepare(model, self.dsq_config, reset=lambda: self.dsq_reset, inference=from_checkpoint)
        self.dsq_state = state_of(model)
        if self.dsq_state is not None:
            self._dsq_model = model
            config, linears = self.dsq_state.config, len(dsq.converted(model))
            logger.info(
                "DSQ %s: %d linears converted, levels %s", config.at(0).mode, linears, levels_text(config.levels)
            )
        return model

    def build_criterion(self, cfg: Any) -> Any:
        criterion, state = super().build_criterion(cfg), self.dsq_state
        packs = state is not None and state.config.stash == "all"
        return in_chunks(criterion, self._dsq_model) if packs else criterion

    def train_step(self, sample: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if self.dsq_state is None or self._described:
            return super().train_step(sample, model, *args, **kwargs)
        calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        hook = self._dsq_model.register_forward_pre_hook(lambda _, *call: calls.append(call), with_kwargs=True)
        try:
            result = super().train_step(sample, model, *args, **kwargs)
        finally:
            hook.remove()
        if calls:
            self._described = True
            self._describe(*calls[0])
        return result

    def _describe(self, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Describe the model by the criterion's arguments, which are more than the batch's net_input."""
        assert self.dsq_state is not None
        keywords.pop(FEATURES_ONLY, None)
        workload = write_workload(self._dsq_model, self.dsq_save_dir, *inputs, **keywords)
        cost = predicted(self.dsq_state.config.as_dict(), workload, self.dsq_updates)
        logger.info("DSQ cost to expect, fixed-point 32 = 1 (dsq-cost, paper profile): %s", cost)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        state = self.dsq_state
        if state is None:
            return
        if state.training:  # fairseq calls this once an update, with the outputs of all workers, and in validation
            before = state.scheduler.level
            if state.record(int(sum(output.get("ntokens", 0) for output in logging_outputs))):
                rise(state, self._dsq_model, before, state.scheduler.updates, "by --dsq-rise-at")
        figures = {"level": state.scheduler.level, **stash_mib(self._dsq_model)}
        for name, value in figures.items():
            metrics.log_scalar(f"dsq_{name}", value, weight=0, priority=150, round=2)

    def begin_valid_epoch(self, epoch: int, model: Any) -> None:
        super().begin_valid_epoch(epoch, model)
        self._validation_is_new = True

    def post_validate(self, model: Any, stats: dict[str, Any], agg: Any) -> None:
        if hasattr(super(), "post_validate"):
            super().post_validate(model, stats, agg)
        if self.dsq_state is None or not self._validation_is_new:  # called for each valid subset: the first one counts
            return
        self._validation_is_new = False
        # stats["loss"] is rounded for the log; the meter is not, and it has summed up all workers
        step_schedule(self.dsq_state, model, stats["num_updates"], float(agg["loss"].avg))
        write_history(self.dsq_state, self.dsq_save_dir)


def step_schedule(state: DSQState, model: Any, update: int, loss: float) -> None:
    """Give a validation loss to the schedule of ``model``, and raise its precision if the level rises."""
    before = state.scheduler.level
    if state.validated(update, loss):
        rise(state, model, before, update, f"no better validation loss in {state.config.patience} validations")


def rise(state: DSQState, model: Any, before: int, update: int, reason: str) -> None:
    """Set ``model`` to the scheduler's level, and log that."""
    dsq.set_level(model, state.config, state.scheduler.level)
    level = f"{state.scheduler.level} {state.scheduler.precision}"
    logger.info("DSQ level %d %s -> %s at update %d: %s", before, state.config.levels[before], level, update, reason)


# ---- the record of a run


def history(state: DSQState) -> dict[str, Any]:
    """Return the run so far, as data for JSON.

    ``levels`` has the precision, updates and tokens of each level; ``validations`` has the update, level and loss of
    each validation.
    """
    config = state.config.as_dict()
    del config["levels"]
    levels = state.scheduler.history()["levels"]
    return {
        **config,
        "level": state.scheduler.level,
        "updates": state.scheduler.updates,
        "tokens": sum(level["tokens"] for level in levels),
        "levels": levels,
        "validations": [
            {**entry, "loss": entry["loss"] if math.isfinite(entry["loss"]) else None} for entry in state.validations
        ],
    }


def write_history(state: DSQState, folder: str) -> None:
    """Write the record of ``state`` to ``folder``, on the first worker only."""
    described = (Path(folder) / WORKLOAD).exists()
    _write(Path(folder) / FILE, {**history(state), "workload": WORKLOAD if described else None})


def write_workload(model: nn.Module, folder: str, *inputs: Any, **keywords: Any) -> dict[str, Any]:
    """Describe a training step ``model(*inputs, **keywords)`` for ``dsq-cost``, without an effect on the run."""
    with torch.random.fork_rng():
        workload = dsq.workload.trace(model, *inputs, **keywords)
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
