"""One run gives the same bits in every trainer, also when it is resumed at level 1."""

import copy
import csv
import importlib
import logging
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector

import dsq
from tests.threads import threads

# ---- one small training run: model, batches, loss and schedule

BATCH, EVERY, HALF, UPDATES = 8, 2, 4, 8  # validation after every EVERY updates; HALF of them are an epoch
LEVELS = "[4,4,4,16] [-,4,-,16]"  # widths, then formats of each operand
#: rises at the second validation: no loss halves
OPTIONS = {"levels": LEVELS, "patience": 1, "threshold": 0.5, "stash": "all"}
CONFIG = dsq.DSQConfig(**OPTIONS)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(12, 32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 4))

    def forward(self, x, labels):
        logits = self.body(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def drawn(count, seed):
    """Rows of numbers, each labeled by its largest among the first four."""
    x = torch.randn(count, 12, generator=torch.Generator().manual_seed(seed))
    return [{"x": row, "labels": row[:4].argmax()} for row in x]


TRAINING, VALIDATION = drawn(BATCH * HALF, 1), drawn(BATCH, 2)
SETS = {"a": VALIDATION, "b": drawn(BATCH, 3)}


def loader(training):
    return torch.utils.data.DataLoader(TRAINING if training else VALIDATION, BATCH)


def optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def updates_from(done, until, batches):
    """(its number, its batch) of each update after ``done``, epoch after epoch."""
    for epoch in range(UPDATES // HALF):
        for update, batch in enumerate(batches, 1 + epoch * HALF):
            if done < update <= until:
                yield update, batch


def validate(model, dynamic):
    """Tell ``dynamic`` the validation loss of ``model``, which may be wrapped by a trainer."""
    model.eval()
    with torch.no_grad():
        dynamic.step(float(model(**next(iter(loader(False))))["loss"]))
    model.train()


def plain_loop(until=UPDATES, saved=None):
    """Model, its precision, and the state that a checkpoint holds, after ``until`` updates."""
    model = Net()
    dynamic = dsq.DynamicPrecision(model, CONFIG)
    optimize = optimizer(model)
    start = 0
    if saved:
        model.load_state_dict(saved["model"])
        optimize.load_state_dict(saved["optimizer"])
        dynamic.load_state_dict(saved["dsq"])
        start = saved["update"]
    for update, batch in updates_from(start, until, loader(True)):
        optimize.zero_grad()
        model(**batch)["loss"].backward()
        optimize.step()
        dynamic.record()
        if update % EVERY == 0:
            validate(model, dynamic)
    state = {"model": model.state_dict(), "optimizer": optimize.state_dict(), "dsq": dynamic.state_dict()}
    return model, dynamic, state | {"update": until}


# ---- the same in each trainer


@pytest.fixture(autouse=True)
def _one_thread():
    with threads(1):
        yield


@pytest.fixture(scope="module")
def plain():
    model, dynamic, _ = plain_loop()
    return parameters_to_vector(model.parameters()), dynamic


def q0(model):
    return {layer.quantizers.precision.q0 for layer in dsq.converted(model).values()}


def same(plain, model, dynamic):
    expected, loop = plain
    assert torch.equal(parameters_to_vector(model.parameters()), expected)
    assert dynamic.state_dict() == loop.state_dict()
    assert q0(model) == {16}


def test_a_conversion_and_a_rise_are_logged(caplog):
    caplog.set_level(logging.INFO, "dsq")
    plain_loop()
    output = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("converted 3 layers to [4,4,4,16], stash='all'") for text in output)
    assert f"update {HALF}: rose to [-,4,-,16]" in output


def test_a_plain_loop_resumed_equals_the_unbroken_one(plain):
    _, dynamic, saved = plain_loop(until=HALF)
    assert dynamic.scheduler.level == 1
    assert [work.updates for work in plain[1].scheduler.work] == [HALF, HALF]
    model, dynamic, _ = plain_loop(saved=copy.deepcopy(saved))
    same(plain, model, dynamic)


NEEDS = {"huggingface": ("transformers", "accelerate"), "lightning": ("lightning.pytorch",)}


def callback_for(trainer, *config, **options):
    """The callback of one of the trainers; skips where that is not installed."""
    for name in NEEDS[trainer]:
        pytest.importorskip(name)
    return importlib.import_module(f"dsq.integrations.{trainer}").PrecisionCallback(*config, **options)


def hugging_face(folder, *callbacks, updates=UPDATES, sets=None, resume=False, **arguments):
    """Train a Net with Hugging Face's Trainer, which is returned. It validates on ``sets``, if they are given."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    usual = {"save_strategy": "steps", "save_steps": HALF, "eval_strategy": "steps" if sets else "no"}
    arguments = transformers.TrainingArguments(
        str(folder), max_steps=updates, per_device_train_batch_size=BATCH, per_device_eval_batch_size=BATCH,
        eval_steps=EVERY, logging_steps=EVERY, use_cpu=True, disable_tqdm=True, max_grad_norm=0,
        lr_scheduler_type="constant", train_sampling_strategy="sequential", **{"report_to": []} | usual | arguments,
    )  # fmt: skip
    model = Net()
    trainer = transformers.Trainer(
        model, arguments, train_dataset=TRAINING, eval_dataset=sets, callbacks=list(callbacks),
        optimizers=(optimizer(model), None),
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def validated(folder, **arguments):
    """Model, precision and trainer of the run."""
    callback = callback_for("huggingface", **OPTIONS)
    trainer = hugging_face(folder, callback, sets=VALIDATION, **arguments)
    return trainer.model, callback.dynamic, trainer


def test_hugging_face_monitors_one_of_several_sets_and_its_best_model_is_at_the_level_that_it_had(tmp_path):
    callback = callback_for("huggingface", **OPTIONS, monitor="eval_b_loss")
    hugging_face(
        tmp_path, callback, updates=HALF, sets=SETS, save_steps=EVERY, load_best_model_at_end=True,
        metric_for_best_model="eval_b_loss", greater_is_better=True,
    )  # fmt: skip
    assert [work.updates for work in callback.dynamic.scheduler.work] == [HALF, 0]
    assert callback.dynamic.scheduler.level == 1  # the first evaluation's loss was the greatest
    assert q0(callback.dynamic.model) == {4}
    for monitor in ("eval_loss", "eval_c_loss"):
        callback = callback_for("huggingface", **OPTIONS, monitor=monitor)
        with pytest.raises(ValueError, match=f"\('eval_a_loss'\), got '{monitor}'"):
            hugging_face(tmp_path, callback, updates=HALF, sets=SETS)


def test_tensorboard_has_the_metrics_a_users_evaluations_do_not_count_and_a_second_training_begins_anew(
    tmp_path, monkeypatch
):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    _, dynamic, trainer = validated(tmp_path / "run", report_to="tensorboard")
    results = {}
    for file in (tmp_path / "events").rglob("events.*"):
        written = events.EventAccumulator(str(file)).Reload()
        for tag in written.Tags()["scalars"]:
            results[tag] = {event.step: event.value for event in written.Scalars(tag)}
    assert results["train/dsq/level"] == {2: 0, 4: 0, 6: 1, 8: 1}
    assert (
        results["train/dsq/validations_without_improvement"][UPDATES]
        == dynamic.scheduler.validations_without_improvement
    )
    assert results["train/dsq/stash_mib"][UPDATES] == pytest.approx(dynamic.metrics()["dsq/stash_mib"])
    before = dynamic.state_dict()
    trainer.evaluate()
    trainer.evaluate(metric_key_prefix="test")
    assert dynamic.state_dict() == before
    assert dynamic.scheduler.level == 1
    callback = next(entry for entry in trainer.callback_handler.callbacks if hasattr(entry, "dynamic"))
    trainer.train()
    assert callback.dynamic is not dynamic
    assert callback.dynamic.scheduler.updates == UPDATES


def lightning_run(folder, *callbacks, updates=UPDATES, validation=None, resume=False, compiled=False, **arguments):
    """Train a Net in a module of Lightning; the trainer."""
    lightning = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, batch):
            return self.net(**batch)["loss"]

        def validation_step(self, batch):
            self.log("val_loss", self.net(**batch)["loss"])

        def configure_optimizers(self):
            return optimizer(self)

    trainer = lightning.Trainer(
        max_steps=updates, val_check_interval=EVERY, num_sanity_val_steps=1, accelerator="cpu",
        callbacks=[*callbacks, ModelCheckpoint(folder, save_on_train_epoch_end=True, save_top_k=-1)],
        enable_progress_bar=False, enable_model_summary=False, log_every_n_steps=1, **{"logger": False} | arguments,
    )  # fmt: skip
    module = torch.compile(Module(), backend="aot_eager") if compiled else Module()
    checkpoint = next(folder.glob("*.ckpt")) if resume else None
    trainer.fit(module, loader(True), validation, ckpt_path=checkpoint, weights_only=False)
    return trainer


@pytest.mark.filterwarnings("ignore")
def test_a_training_step_that_lightning_compiles_is_packed_too(tmp_path):
    held = []
    for callbacks in ([], [callback_for("lightning")]):
        torch._dynamo.reset()
        module = lightning_run(tmp_path, *callbacks, updates=2, compiled=True).lightning_module
        assert "_torchdynamo_orig_callable" in vars(vars(module)["training_step"])  # as Lightning left it
        held.append(dsq.stash.measure(lambda: module.training_step(next(iter(loader(True))))).nbytes)  # noqa: B023
    assert held[1] < 0.7 * held[0]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("trainer", "train"), [("huggingface", hugging_face), ("lightning", lightning_run)])
def test_fractions_are_of_what_is_left_of_a_run_that_began_without_dsq(trainer, train, tmp_path):
    callback = callback_for(trainer, LEVELS, rise_at=0.5)
    train(tmp_path, updates=HALF)
    train(tmp_path, callback, resume=True)
    assert [work.updates for work in callback.dynamic.scheduler.work] == [2, 2]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("limit", [{}, {"max_steps": 2 * UPDATES}])
def test_two_optimizers_of_a_batch_in_lightning_do_not_raise_the_level_early(limit, tmp_path):
    callback = callback_for("lightning", LEVELS, rise_at=0.5)
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.automatic_optimization, self.widths = Net(), False, []

        def training_step(self, batch):
            self.widths += q0(self)
            self.manual_backward(self.net(**batch)["loss"])
            for optimize in self.optimizers():
                optimize.step()

        def configure_optimizers(self):
            return optimizer(self.net.body[0]), optimizer(self.net.body[2:])

    module, arguments = Module(), {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    epochs = 10 if limit else UPDATES // HALF
    trainer = lightning.Trainer(max_epochs=epochs, accelerator="cpu", default_root_dir=tmp_path, **arguments, **limit)
    trainer.callbacks.append(callback)
    trainer.fit(module, loader(True))
    assert module.widths == [4] * HALF + [16] * HALF


def not_training_in_lightning(count):
    """A trainer that trains nothing, a callback for it, and so many modules."""
    callback = callback_for("lightning", CONFIG)
    import lightning.pytorch as lightning

    trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    modules = [lightning.LightningModule() for _ in range(count)]
    for module in modules:
        module.net = Net()
    return trainer, callback, modules


def test_a_level_that_cannot_rise_is_warned_of(tmp_path):
    trainer, callback, (module,) = not_training_in_lightning(1)
    with pytest.warns(UserWarning, match="cannot rise without evaluations"):
        hugging_face(tmp_path, callback_for("huggingface", **OPTIONS), updates=HALF)
    hugging_face(tmp_path, callback_for("huggingface", LEVELS, rise_at=[2]), updates=HALF)
    callback.setup(trainer, module, "fit")
    with pytest.warns(UserWarning, match="cannot rise without validations"):
        callback.on_train_start(trainer, module)


def test_a_callback_of_lightning_serves_one_module_after_another():
    trainer, callback, modules = not_training_in_lightning(2)
    for module in modules:
        callback.setup(trainer, module, "fit")
        assert dsq.converted(module)
        assert callback.dynamic.model is module
        callback.dynamic.record(3)
        work = callback.dynamic.scheduler.work
        callback.setup(trainer, module, "fit")  # goes on
        assert callback.dynamic.scheduler.work is work


def validated_in_lightning(folder, **arguments):
    """Lightning does the same."""
    callback = callback_for("lightning", CONFIG)
    trainer = lightning_run(folder, callback, validation=loader(False), **arguments)
    return trainer.lightning_module.net, callback.dynamic, trainer


def test_lightning_tests_a_checkpoint_at_its_level():
    trainer, callback, modules = not_training_in_lightning(3)
    callback.on_test_start(trainer, modules[1])
    assert not dsq.converted(modules[1])  # no checkpoint said how
    callback.setup(trainer, modules[0], "fit")
    early = callback.state_dict()
    dsq.set_level(modules[0], callback.config, 1)  # the training went on
    callback.load_state_dict(early)
    for module in modules[:2]:  # the second is not the one that was trained
        callback.on_test_start(trainer, module)
        assert q0(module) == {4}
    early["scheduler"]["level"] = 1
    callback.setup(trainer, modules[2], "fit")
    callback.on_validation_start(trainer, modules[2])
    assert q0(modules[2]) == {4}


@pytest.mark.parametrize("trainer", NEEDS)
def test_every_callback_takes_the_same(trainer):
    callback = partial(callback_for, trainer)
    advised = dsq.DSQConfig("[8,4,8,8]", stash="all")
    assert callback(advised).config == callback("[8,4,8,8]").config == advised
    assert callback().config == dsq.DSQConfig()
    whole = dsq.DSQConfig(LEVELS, rise_at=0.8, stash="linears")
    assert callback(LEVELS, rise_at=0.8, stash="linears").config == callback(whole).config == whole
    assert dsq.DynamicPrecision(Net(), LEVELS, 100, rise_at=0.8, stash="linears").config == whole
    with pytest.raises(TypeError, match="config is whole already: put rise_at into it"):
        callback(whole, rise_at=0.8)


@pytest.mark.filterwarnings("ignore")
def test_lightnings_own_logger_writes_the_metrics(tmp_path):
    loggers = pytest.importorskip("lightning.pytorch.loggers")
    logger = loggers.CSVLogger(tmp_path, flush_logs_every_n_steps=1)
    _, dynamic, trainer = validated_in_lightning(tmp_path / "run", logger=logger)
    before = dynamic.state_dict()
    trainer.validate(trainer.lightning_module, loader(False))  # does not count
    assert dynamic.state_dict() == before
    with open(f"{logger.log_dir}/metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["dsq/level"]]
    assert [float(row["dsq/level"]) for row in rows] == [0] * HALF + [1] * HALF
    assert {row["dsq/stash_bits"] for row in rows} == {"4.0"}
    assert 0 < float(rows[-1]["dsq/stash_mib"]) == pytest.approx(dynamic.metrics()["dsq/stash_mib"])


def accelerated(folder, updates=UPDATES, resume=False):
    """Model and precision of the run."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net()
    dynamic = dsq.DynamicPrecision(model, CONFIG)
    accelerator.register_for_checkpointing(dynamic)
    prepared, optimize, batches = accelerator.prepare(model, optimizer(model), loader(True))
    if resume:
        accelerator.load_state(folder)
    done = sum(work.updates for work in dynamic.scheduler.work)
    for update, batch in updates_from(done, updates, batches):
        optimize.zero_grad()
        accelerator.backward(prepared(**batch)["loss"])
        optimize.step()
        dynamic.record()
        if update % EVERY == 0:
            validate(prepared, dynamic)
    accelerator.save_state(folder)
    return model, dynamic


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [validated, validated_in_lightning, accelerated])
def test_a_run_and_one_that_was_resumed_equal_the_plain_loop(run, plain, tmp_path):
    model, dynamic, *_ = run(tmp_path / "whole")
    same(plain, model, dynamic)
    run(tmp_path / "broken", updates=HALF)
    model, dynamic, *_ = run(tmp_path / "broken", resume=True)
    same(plain, model, dynamic)
