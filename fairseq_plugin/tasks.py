"""Every fairseq task, with DSQ: the task converts its model, measures and records its training, and steps the schedule.

The tasks are replaced in fairseq's registry under their own names, so that ``--task translation`` is what it was and
takes the --dsq-* flags too. The task is the right place: fairseq asks it for the model in training and in generation
alike (sentence_prediction adds its classification head there), and tells it of each update and each validation.
"""

import dataclasses
import functools
import inspect
import logging
import weakref
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils, options
from fairseq.file_io import PathManager
from fairseq.logging import metrics
from fairseq.tasks import TASK_DATACLASS_REGISTRY, TASK_REGISTRY, FairseqTask
from fairseq.trainer import Trainer
from fairseq_cli import train
from hydra.core.config_store import ConfigStore

import dsq
from costmodel.prediction import predicted
from dsq.precision import levels_text
from dsq.scheduler import updates_left
from fairseq_plugin import checkpoints
from fairseq_plugin.flags import DSQFlags, InputError, add_flags, config_of
from fairseq_plugin.mistakes.limits import require_architecture, strict
from fairseq_plugin.model import prepare, state_of
from fairseq_plugin.run import stash
from fairseq_plugin.run.history import set_aside, write_history, write_workload
from fairseq_plugin.run.length import total_updates
from fairseq_plugin.run.state import DSQState

logger = logging.getLogger(__name__)


class DSQTask(FairseqTask):
    """What DSQ adds to a task; without --dsq-levels, nothing. Comes before the task's own class."""

    dsq_config: dsq.DSQConfig | None = None
    dsq_reset = False
    dsq_save_dir = ""
    dsq_total_updates = 0  #: of the run, from the first epoch on; 0: nothing bounds it
    dsq_updates_before = 0  #: without DSQ, in the checkpoint that it began from
    dsq_state: DSQState | None = None
    _dsq_model: Callable[[], Any]  #: weak, as the trainer has the model
    _dsq_trainer: Callable[[], Any]  #: weak, as the trainer has the task
    _validation_is_new = False
    _described = False

    @classmethod
    def setup_task(cls, cfg: Any, **kwargs: Any) -> FairseqTask:
        config = config_of(cfg)
        task = super().setup_task(cfg, **kwargs)
        task.dsq_config = config
        task.dsq_reset = getattr(cfg, "dsq_reset", False)
        # a model with options of argparse has a namespace of everything; a task's config, the field of DSQFlags
        task.dsq_save_dir = getattr(cfg, "dsq_save_dir", None) or getattr(cfg, "save_dir", "")
        return task

    def build_model(self, cfg: Any, from_checkpoint: bool = False) -> Any:
        build = super().build_model
        takes_it = "from_checkpoint" in inspect.signature(build).parameters
        try:
            model = build(cfg, from_checkpoint) if takes_it else build(cfg)
        except (ValueError, AssertionError, ZeroDivisionError) as error:  # how fairseq's models refuse their flags
            if not str(error):
                raise
            raise InputError(f"the flags of --arch, such as its sizes: {error}; give others") from error
        prepare(model, self.dsq_config, reset=self.dsq_reset, inference=from_checkpoint)
        self.dsq_state = state_of(model)
        self._dsq_model = weakref.ref(model)
        if self.dsq_state is not None:
            levels = levels_text(self.dsq_state.config.levels)
            logger.info("DSQ: %d linears converted, levels %s", len(dsq.converted(model)), levels)
        return model

    def train_step(self, sample: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        state = self.dsq_state
        if state is None:
            return super().train_step(sample, model, *args, **kwargs)
        if not self._described and "net_input" in sample:
            self._described = True
            workload = write_workload(self._dsq_model(), sample["net_input"], self.dsq_save_dir)
            cost = predicted(state.config.as_dict(), workload, self.dsq_updates)
            logger.info("DSQ cost to expect, fixed-point 32 = 1 (dsq-cost, paper profile): %s", cost)
        with stash.sampled(state.stash, state.scheduler, model):
            return super().train_step(sample, model, *args, **kwargs)

    def reduce_metrics(self, logging_outputs: list[dict[str, Any]], criterion: Any) -> None:
        super().reduce_metrics(logging_outputs, criterion)
        state = self.dsq_state
        if state is None:
            return
        if state.training:  # fairseq calls this once an update, with the outputs of all workers, and in validation
            before = state.scheduler.level
            if state.record(int(sum(output.get("ntokens", 0) for output in logging_outputs))):
                rise(state, self._dsq_model(), before, state.scheduler.updates, "as --dsq-rise-at says")
                self._set_learning_rate()
        metrics.log_scalar("dsq_level", state.scheduler.level, weight=0, priority=150)

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
        self._set_learning_rate()
        write_history(self.dsq_state, self.dsq_save_dir)

    @property
    def dsq_updates(self) -> int:
        """Those of ``dsq_total_updates`` that are made with DSQ; 0: nothing bounds them."""
        return updates_left(self.dsq_total_updates, self.dsq_updates_before) or 0

    def _set_learning_rate(self) -> None:
        """That of the next update, after a rise: a run that is resumed there begins with it."""
        if self.dsq_state is not None and self.dsq_state.config.lr_at_rise == "restart":
            self._dsq_trainer().lr_step_update()


def step_schedule(state: DSQState, model: Any, update: int, loss: float) -> None:
    """Give a validation loss to the schedule of ``model``, and raise its precision if that says so."""
    before = state.scheduler.level
    if state.validated(update, loss):
        rise(state, model, before, update, f"no better validation loss in {state.config.patience} validations")


def rise(state: DSQState, model: Any, before: int, update: int, why: str) -> None:
    """Bring ``model`` to the scheduler's level, and say so in the log."""
    dsq.set_level(model, state.config, state.scheduler.level)
    logger.info(
        "DSQ level %d %s -> %d %s at update %d: %s",
        before,
        state.config.levels[before],
        state.scheduler.level,
        state.scheduler.precision,
        update,
        why,
    )


def extend_fairseq() -> None:
    """Give all of fairseq's tasks, its training parser and its trainer what DSQ adds."""
    for name in list(TASK_REGISTRY):
        _extend_task(name)
    options.get_parser = strict(options.get_parser)
    options.add_model_args = _and_then(options.add_model_args, lambda group, parser: add_flags(parser))
    options.add_model_args = _and_then(options.add_model_args, lambda group, parser: require_architecture(parser))
    train.get_valid_stats = _check_metric(train.get_valid_stats)
    train.train = _up_to_max_update(train.train)
    checkpoint_utils.verify_checkpoint_directory = checkpoints.claim
    checkpoint_utils.load_checkpoint_to_cpu = checkpoints.checked(checkpoint_utils.load_checkpoint_to_cpu)
    checkpoint_utils.torch_persistent_save = checkpoints.save
    PathManager.copy = staticmethod(checkpoints.copy)
    checkpoint_utils.load_checkpoint = _and_then(checkpoint_utils.load_checkpoint, _begin)
    Trainer._build_optimizer = _and_then(Trainer._build_optimizer, _follow)
    Trainer.save_checkpoint = _and_then(Trainer.save_checkpoint, _write_history_too)


def _extend_task(name: str) -> None:
    task = TASK_REGISTRY[name]
    extended = type(f"DSQ{task.__name__}", (DSQTask, task), {"__module__": __name__})
    if name in TASK_DATACLASS_REGISTRY:
        options_class = TASK_DATACLASS_REGISTRY[name]
        with_flags = dataclasses.make_dataclass(f"DSQ{options_class.__name__}", [], bases=(DSQFlags, options_class))
        TASK_DATACLASS_REGISTRY[name] = with_flags
        setattr(extended, "__dataclass", with_flags)
        node = with_flags()
        node._name = name
        ConfigStore.instance().store(name=name, group="task", node=node, provider="fairseq")
    TASK_REGISTRY[name] = extended


def _check_metric(get_valid_stats: Callable) -> Callable:
    """``get_valid_stats``, which refuses a metric that the validation did not give."""

    @functools.wraps(get_valid_stats)
    def get(cfg: Any, trainer: Trainer, stats: dict[str, Any], *args: Any) -> dict[str, Any]:
        metric = cfg.checkpoint.best_checkpoint_metric
        if metric not in stats:
            raise InputError(f"--best-checkpoint-metric must be one of {', '.join(stats)}, got {metric!r}")
        found: dict[str, Any] = get_valid_stats(cfg, trainer, stats, *args)
        return found

    return get


def _up_to_max_update(train_epoch: Callable) -> Callable:
    """``train_epoch``, which leaves a run that has made all its updates as it is: fairseq's looks after one more."""

    @functools.wraps(train_epoch)
    def train(cfg: Any, trainer: Trainer, *args: Any) -> Any:
        if 0 < cfg.optimization.max_update <= trainer.get_num_updates():
            logger.info("the run had made its %d updates", trainer.get_num_updates())
            return [None], True
        return train_epoch(cfg, trainer, *args)

    return train


def _begin(loaded: tuple[Any, Any], cfg: Any, trainer: Trainer) -> None:
    """Tell the run how long it is, now that fairseq has its batches; ``loaded``: of ``load_checkpoint``."""
    state = getattr(trainer.task, "dsq_state", None)
    if trainer.is_data_parallel_master and (state is None or not state.scheduler.updates):
        set_aside(cfg.save_dir)
    if state is not None:
        _, epochs = loaded
        task = trainer.task
        task.dsq_total_updates = total_updates(trainer.cfg.optimization, len(epochs))
        task.dsq_updates_before = trainer.get_num_updates() - state.scheduler.updates
        state.set_total_updates(task.dsq_updates)
        trainer.lr_step_update()  # the learning rate may hang on it, too


def _follow(_: None, trainer: Trainer) -> None:
    """Let the learning rate do at a rise what --dsq-lr-at-rise says."""
    state = getattr(trainer.task, "dsq_state", None)
    if state is None or state.config.lr_at_rise == "keep":
        return
    task, step = trainer.task, trainer._lr_scheduler.step_update
    task._dsq_trainer = weakref.ref(trainer)
    trainer._lr_scheduler.step_update = lambda update: step(
        state.scheduler.restarted(update, task.dsq_total_updates, task.dsq_updates_before)
    )


def _write_history_too(_: None, trainer: Trainer, *args: object) -> None:
    state = getattr(trainer.task, "dsq_state", None)
    if state is not None:
        write_history(state, trainer.cfg.checkpoint.save_dir)


def _and_then(first: Callable, then: Callable) -> Callable:
    """A function that calls ``first``, and then ``then`` with its result and the same arguments."""

    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        then(result, *args)
        return result

    return both
