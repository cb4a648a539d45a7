"""The levels of a DynamicPrecision that no one named: decided at the first training forward, for good."""

import contextlib
import copy
import gc
import json
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import dsq
from dsq import first_training

X = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(0))
SAVING, SIMULATION = "[-,4,-,-]", "[8,4,8,8]"


class Model(nn.Module):
    """Layers behind a norm; ``autocasts`` as accelerate does, inside of the call; ``segments`` are checkpoints."""

    def __init__(self, autocasts=False, segments=False):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(32), nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
        self.autocasts, self.segments = autocasts, segments

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16) if self.autocasts else contextlib.nullcontext():
            x = checkpoint(self.norm, x, use_reentrant=False) if self.segments else self.norm(x)
            return checkpoint(self.layers, x, use_reentrant=False) if self.segments else self.layers(x)


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def step(run):
    run(X).square().mean().backward()


def levels(dynamic):
    return dynamic.config.as_dict()["levels"]


def modes(model):
    return {layer.quantizers.mode for layer in dsq.converted(model).values()}


@pytest.fixture(autouse=True)
def _no_units(monkeypatch):
    monkeypatch.setattr(first_training, "multiplies_bfloat16", lambda device: False)


def test_saved_tensors_alone_are_packed_under_autocast_and_where_the_device_multiplies_bfloat16(monkeypatch):
    decided = []
    for context, autocasts in ((contextlib.nullcontext, False), (autocast, False), (contextlib.nullcontext, True)):
        dynamic = dsq.DynamicPrecision(Model(autocasts))
        model = dynamic.model
        with context():
            with torch.no_grad():
                model(X)
            assert dynamic.config.undecided
            step(model)
        decided.append(str(dynamic.scheduler.precision))
        step(model)
        assert dynamic.metrics()["dsq/simulation"] == float(decided[-1] == SIMULATION)
        assert not any(module._forward_pre_hooks for module in dsq.converted(model).values())
    assert decided == [SIMULATION, SAVING, SAVING]
    monkeypatch.setattr(first_training, "multiplies_bfloat16", lambda device: device.type == "cpu")
    dynamic = dsq.DynamicPrecision(Model())
    step(dynamic.model)
    assert repr(dynamic) == "DynamicPrecision([-,4,-,-], saving, level 1 of 1, 0 updates)"
    assert {str(layer.quantizers.precision) for layer in dsq.converted(dynamic.model).values()} == {
        "[- - | - - | - snvint4]"
    }


class Stem(Model):
    """A linear layer before the autocast of the others."""

    def __init__(self):
        super().__init__(autocasts=True)
        self.stem = nn.Linear(32, 32)

    def forward(self, x):
        return super().forward(self.stem(x))


def test_a_training_in_evaluation_mode_decides_at_its_first_forward_under_autocast():
    dynamic = dsq.DynamicPrecision(Model().eval())
    with autocast():
        step(dynamic.model)
    assert modes(dynamic.model) == {"saving"}


@pytest.mark.parametrize("trial", [False, True])
def test_autocast_that_comes_after_the_first_layer_or_after_a_trial_decides_anew(trial):
    dynamic = dsq.DynamicPrecision(Model() if trial else Stem())
    step(dynamic.model)
    with autocast() if trial else contextlib.nullcontext():
        step(dynamic.model)
    assert levels(dynamic) == [SAVING]
    assert modes(dynamic.model) == {"saving"}
    assert not any(layer._forward_pre_hooks for layer in dsq.converted(dynamic.model).values())


@pytest.mark.parametrize("recorded", [False, True])
def test_the_decision_is_final_after_the_first_update(recorded):
    model = Model()
    dynamic = dsq.DynamicPrecision(model)
    step(model)
    dynamic.record() if recorded else step(model)
    with autocast():
        step(model)
    assert modes(model) == {"simulation"}


def test_a_compiled_model_whose_first_layer_is_outside_of_autocast_is_warned_of(fresh_compiler):
    dynamic = dsq.DynamicPrecision(Stem(), stash="linears")
    with pytest.warns(UserWarning, match=r'write dsq.DynamicPrecision\(model, "\[-,4,-,-\]"\)'):
        step(torch.compile(dynamic.model, backend="aot_eager"))
    assert modes(dynamic.model) == {"simulation"}


@pytest.mark.parametrize(
    "options", [{"config": SIMULATION}, {"attention": True}, {"format": "bfp"}, {"rounding": "stochastic"}]
)
def test_who_names_levels_or_how_products_are_made_gets_them(options):
    dynamic = dsq.DynamicPrecision(Model(), **options)
    before = dynamic.config
    with autocast():
        step(dynamic.model)
    assert dynamic.config == before
    assert str(before.levels[0]) == SIMULATION


@pytest.mark.parametrize("autocasts, symbolic", [(False, None), (True, None), (False, True)])  # traced twice: True
def test_a_compiler_traces_one_graph_in_which_the_levels_are_decided(autocasts, symbolic, fresh_compiler):
    dynamic = dsq.DynamicPrecision(Model(autocasts), stash="linears")
    run = torch.compile(dynamic.model, backend="aot_eager", fullgraph=True, dynamic=symbolic)
    for _ in range(3):
        with contextlib.nullcontext() if autocasts else autocast():
            step(run)
        dynamic.record()
    assert levels(dynamic) == [SAVING]
    assert counters["stats"]["unique_graphs"] == 1


def test_a_resumed_run_keeps_what_it_began_with():
    first = dsq.DynamicPrecision(Model())
    undecided = json.loads(json.dumps(first.state_dict()))
    with autocast():
        step(first.model)
    first.record(3)
    with warnings.catch_warnings(action="error"):
        for config in (None, SAVING):
            resumed = dsq.DynamicPrecision(Model(), config)
            resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
            step(resumed.model)
            assert levels(resumed) == [SAVING]
            assert resumed.scheduler.updates == 3
        undecided_run = dsq.DynamicPrecision(Model())
        undecided_run.load_state_dict(undecided)
        step(undecided_run.model)
    assert levels(undecided_run) == [[8, 4, 8, 8]]
    assert levels(dsq.DynamicPrecision(first.model)) == ["auto"]  # a second trainer's


def test_checkpoints_of_the_first_forward_are_recomputed_at_the_level_that_it_decides():
    gradients = []
    for options in ({"config": SAVING}, {}):
        torch.manual_seed(0)
        dynamic = dsq.DynamicPrecision(Model(segments=True), **options)
        with autocast():
            loss = dynamic.model(X).square().mean()
        loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in dynamic.model.parameters()]))
    assert torch.equal(*gradients)


def test_a_report_decides_nothing_and_a_check_compares_what_trains():
    dynamic = dsq.DynamicPrecision(Model())
    with autocast():
        assert dsq.report(dynamic.model, X).mode == "undecided"
        assert dynamic.config.undecided
        check = dynamic.check(lambda: dynamic.model(X).square().mean())
        assert check.error == check.of_stash > 0
        assert "saving: products are the trainer's" in str(dsq.report(dynamic.model, X))


@pytest.mark.parametrize("stash", ["all", "linears"])
def test_a_model_of_one_layer_is_seen_under_accelerates_autocast(stash):
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)  # that of another test of the process
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    try:
        dynamic = dsq.DynamicPrecision(nn.Linear(32, 32), stash=stash)
        step(accelerator.prepare(dynamic.model))
        assert levels(dynamic) == [SAVING]
    finally:
        accelerator.state._reset_state(reset_partial_state=True)


def test_copies_pickles_and_former_schedules_leave_the_model_alone():
    dynamic = dsq.DynamicPrecision(Model(), stash="linears")
    copied = pickle.loads(pickle.dumps(dynamic))
    for model in (copied.model, pickle.loads(pickle.dumps(dynamic.model))):
        step(model)
    assert dynamic.config.undecided
    copied.record()
    assert levels(copied) == [[8, 4, 8, 8]]
    ema = copy.deepcopy(dynamic.model)
    dsq.unconvert(dynamic.model)
    assert not any(module._forward_pre_hooks for module in dynamic.model.modules())
    explicit = dsq.DynamicPrecision(dynamic.model, "[4,4,4,8]")
    with autocast():
        step(dynamic.model)
        step(ema)
        dynamic.record()
    assert explicit.model.layers[0].quantizers.precision == dsq.Precision(4, 4, 4, 8)


def test_the_default_is_decided_also_for_a_trainer_that_keeps_no_dynamic_precision():
    model = Model()
    dsq.DynamicPrecision(model)
    gc.collect()
    with autocast():
        step(model)
    assert modes(model) == {"saving"}


@pytest.mark.parametrize("first", ["model", "copy"])
def test_copies_made_before_follow_the_decision_unless_they_were_set_to_a_level(first):
    dynamic = dsq.DynamicPrecision(Model())
    average, other = copy.deepcopy(dynamic.model), copy.deepcopy(dynamic.model)
    dsq.set_level(other, dsq.DSQConfig("[4,4,4,8]"), 0)
    with autocast():
        step(dynamic.model if first == "model" else average)
        for model in (average, other):
            model.eval()(X)
    assert levels(dynamic) == [SAVING]
    assert modes(dynamic.model) == modes(average) == {"saving"}
    assert modes(other) == {"simulation"}


def test_processes_with_unlike_devices_agree_on_the_first_ones_answer(monkeypatch, one_process):
    for multiplies in (True, False):
        monkeypatch.setattr(first_training, "multiplies_bfloat16", lambda device, answer=multiplies: answer)
        dynamic = dsq.DynamicPrecision(Model())
        step(dynamic.model)
        assert levels(dynamic) == [SAVING]


def test_a_model_without_products_saves():
    with pytest.warns(UserWarning, match="no product to convert"):
        dynamic = dsq.DynamicPrecision(nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU()))
    assert levels(dynamic) == [SAVING]
