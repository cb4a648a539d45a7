"""DynamicPrecision: its state as JSON, its metrics, checks of the gradient, and warnings."""

import copy
import json
import pickle
import sys
import warnings

import pytest
import torch
from torch import nn

import dsq
from dsq.stash.controller import applied

CONFIG = dsq.DSQConfig(levels=("[2,2,2,16]", "[8,4,4,16]"), patience=1, exclude="head", attention=True, stash="linears")


def one_layer(*levels, **options):
    return dsq.DynamicPrecision(
        nn.Sequential(nn.Linear(8, 8)), dsq.DSQConfig(*levels, **{"stash": "linears", **options})
    )


def test_a_run_comes_back_from_json():
    def made():
        return dsq.DynamicPrecision(nn.ModuleDict({"body": nn.Linear(8, 8), "head": nn.Linear(8, 4)}), CONFIG)

    dynamic = made()
    text = json.dumps(dynamic.state_dict(), allow_nan=False)
    dynamic.step(torch.tensor(1.0))
    dynamic.step(2.0)
    dynamic.record(3, 40)
    later = json.dumps(dynamic.state_dict(), allow_nan=False)
    for written, level in ((text, 0), (later, 1)):
        resumed = made()
        resumed.load_state_dict(json.loads(written))
        assert resumed.config == CONFIG
        assert list(dsq.converted(resumed.model)) == ["body"]
        assert resumed.model["body"].quantizers.precision == CONFIG.levels[level]
        assert resumed.scheduler.level == level
        assert json.dumps(resumed.state_dict()) == written


def test_a_run_that_goes_on_with_another_config_says_so_and_no_warning_comes_twice():
    with pytest.warns(UserWarning, match="may damage training"):
        state, other = one_layer("[2,2,2,16]").state_dict(), one_layer("[2,2,2,16]", patience=2)
    with pytest.warns(UserWarning, match="goes on with the config of its state: patience=5, not with what was given"):
        other.load_state_dict(state)
    assert other.config.patience == 5
    with warnings.catch_warnings(action="error"):
        other.load_state_dict(state)


def test_dynamic_precision_is_copied_and_pickled():
    dynamic = one_layer()
    dynamic.model(torch.randn(16, 8)).sum().backward()
    for copied in (copy.deepcopy(dynamic), pickle.loads(pickle.dumps(dynamic))):
        assert of_the_model(copied) == of_the_model(dynamic)
    assert 0 < dynamic.metrics()["dsq/process_resident_mib"] <= dynamic.metrics()["dsq/process_peak_mib"]


def test_the_bits_so_far_stand_in_the_metrics():
    dynamic, seen = one_layer("[4,3,3,8] [8,4,8,8]", rise_at=6), []
    for _ in range(4):
        metrics = dynamic.metrics()
        seen.append((metrics["dsq/stash_bits"], metrics["dsq/mean_bits"]))
        dynamic.record(3)
    assert seen == [(3, 3), (3, 3), (4, 3), (4, pytest.approx(10 / 3))]


X = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(0))


def mlp(levels):
    return dsq.DynamicPrecision(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), levels)


def test_the_gradient_is_checked_every_so_many_updates_and_a_damaged_one_is_warned_of():
    dynamic, damaged, calls = mlp("[8,4,4,8]"), mlp("[2,2,2,2]"), []

    def loss():
        calls.append(1)
        return dynamic.model(X).square().sum()

    assert not {"dsq/gradient_error", "dsq/stash_mib"} & dynamic.metrics().keys()
    results = [dynamic.check(loss, every=3) for _ in range(7) if dynamic.record() or True]
    assert [check is not None for check in results] == [True, False, False, True, False, False, True]
    assert len(calls) == 9
    seen, last = dynamic.metrics(), results[-1]
    names = ("dsq/gradient_error", "dsq/gradient_cosine", "dsq/gradient_error_of_stash")
    assert tuple(seen[name] for name in names) == (last.error, last.cosine, last.of_stash)
    with pytest.warns(UserWarning, match="at update 0: gradient"):
        damaged.check(lambda: damaged.model(X).square().sum())
    assert 0 < seen["dsq/stash_mib"] == copy.deepcopy(dynamic).metrics()["dsq/stash_mib"]


def of_the_model(dynamic):
    """Metrics but those of the process, which change by themselves."""
    return {name: value for name, value in dynamic.metrics().items() if not name.startswith("dsq/process")}


def test_a_level_that_waits_for_a_validation_says_so_once():
    levels = "[4,3,3,8] [8,4,8,8]"
    dynamic, validated, timed = (one_layer(levels, **options) for options in ({}, {}, {"rise_at": 5000}))
    dynamic.record(999)
    with pytest.warns(UserWarning, match=r"1000 updates at \[4,3,3,8\] and no validation.*dynamic.step.*rise_at"):
        dynamic.record()
    validated.step(1.0)
    with warnings.catch_warnings(action="error"):
        for run in (dynamic, validated, timed):
            run.record(1000)


def test_a_run_that_ends_before_a_validation_came_says_so():
    levels = "[4,3,3,8] [8,4,8,8]"
    unvalidated, validated, unused = one_layer(levels), one_layer(levels), one_layer(levels)
    unvalidated.record(30)
    with pytest.warns(UserWarning, match=r"30 updates at \[4,3,3,8\] and no validation"):
        del unvalidated
    validated.record(30)
    validated.step(1.0)
    resumed = one_layer(levels)
    resumed.load_state_dict(validated.state_dict())
    resumed.record()
    with warnings.catch_warnings(record=True) as caught:
        del validated, resumed, unused
    assert not caught


def test_validations_of_a_schedule_in_updates_ask_for_these():
    forgotten, counted = (one_layer("[4,3,3,8] [8,4,8,8]", rise_at=20) for _ in range(2))
    counted.record()
    with pytest.warns(UserWarning, match=r"rise_at counts.*dynamic.record\(\).*after each update"):
        forgotten.step(1.0)
    with warnings.catch_warnings(action="error"):
        forgotten.step(1.0)
        counted.step(1.0)


def test_a_loss_in_another_method_is_told_that_the_stash_does_not_see_it(monkeypatch):
    class Model(nn.Sequential):
        def loss(self, x):
            return self[1](self[0](x)).sum()

    monkeypatch.delitem(sys.modules, "torch._dynamo.convert_frame", raising=False)  # another test's, in this process
    for loss, warned in ((lambda model, x: model.loss(x), True), (lambda model, x: model(x).sum(), False)):
        dynamic = dsq.DynamicPrecision(Model(nn.Linear(64, 64), nn.GELU()))
        loss(dynamic.model, torch.randn(64, 64)).backward()
        expected = pytest.warns(UserWarning, match="let forward compute the loss")
        with expected if warned else warnings.catch_warnings(action="error"):
            dynamic.record()


def test_a_model_that_ends_to_be_called_or_converted_is_warned_of_once(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch._dynamo.convert_frame", raising=False)
    dynamic = mlp("[8,4,4,8]")
    with warnings.catch_warnings(action="error"):
        for _ in range(2):
            dynamic.model(X).sum().backward()
            for _ in range(100):
                dynamic.record()
    with pytest.warns(UserWarning, match="let forward compute the loss"):
        dynamic.record()
    with warnings.catch_warnings(action="error"):
        dynamic.record()
    dsq.unconvert(dynamic.model)
    with pytest.warns(UserWarning, match="the model was unconverted.*a new DynamicPrecision"):
        dynamic.record()
    with warnings.catch_warnings(action="error"):
        dynamic.record()


def test_a_resumed_run_rises_where_the_unbroken_one_does():
    config = dsq.DSQConfig("[4,3,3,8] [8,4,8,8]", rise_at=0.5, stash="linears")
    first, resumed = (dsq.DynamicPrecision(nn.Linear(8, 8), config, total_updates=8) for _ in range(2))
    first.record(3)
    resumed.load_state_dict(first.state_dict())
    resumed.began_after(3)
    assert resumed.scheduler.rise_at == (4,)


def trunk():
    return nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


def test_a_model_of_which_a_part_was_converted_is_converted_as_a_whole():
    part, x = trunk(), torch.randn(512, 64)
    dsq.DynamicPrecision(part)
    stashes = []
    for body in (part, trunk()):
        model = nn.Sequential(body, nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 8))
        dsq.DynamicPrecision(model)
        stashes.append(dsq.stash.measure(lambda model=model: model(x).sum()).nbytes)
    assert stashes[0] == stashes[1]
    with pytest.raises(ValueError, match="config must have stash='linears', as the model was converted"):
        dsq.DynamicPrecision(nn.Sequential(dsq.convert(trunk(), stash="linears"), nn.ReLU()))


def test_a_wrapper_adopts_the_model_that_it_holds():
    model = trunk()
    dsq.DynamicPrecision(model)
    policy = applied(model)
    wrapper = torch.optim.swa_utils.AveragedModel(model)
    wrapper.module = model
    dsq.DynamicPrecision(wrapper)
    assert applied(model) == policy
    assert not applied(wrapper)


def test_one_model_has_one_schedule():
    first, other = one_layer("[4,4,4,8]"), dsq.DSQConfig("[8,4,8,8]")
    model = first.model
    dsq.DynamicPrecision(model, first.config)
    for whole in (model, nn.Sequential(model, nn.Linear(8, 8))):
        with pytest.raises(ValueError, match=r"DynamicPrecision which the model has, with levels=.*dsq.unconvert"):
            dsq.DynamicPrecision(whole, other)
    assert model[0].quantizers.precision == first.config.levels[0]
    second = dsq.DynamicPrecision(dsq.unconvert(model), other)
    assert model[0].quantizers.precision == second.config.levels[0]


def test_weights_that_are_loaded_without_the_schedule_are_warned_of():
    resumed, whole, late, before = (one_layer() for _ in range(4))
    state = before.model.state_dict()
    resumed.model.load_state_dict(state)
    with pytest.warns(UserWarning, match=r"none into its DynamicPrecision.*load_state_dict\(saved\[\"dsq\"\]\)"):
        resumed.record()
    whole.model.load_state_dict(state)
    whole.load_state_dict(before.state_dict())
    late.record()
    late.model.load_state_dict(state)
    with warnings.catch_warnings(action="error"):
        for dynamic in (resumed, whole, late):
            dynamic.record()
            assert not dynamic.model._load_state_dict_post_hooks


class Core(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.layers = nn.LayerNorm(64), nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))

    def forward(self, x):
        return self.layers(torch.tanh(self.norm(torch.sin(x * self.norm.weight))))


def test_a_module_that_wrappers_hold_alone_is_packed_by_itself_as_peft_returns_it():
    x, model, core = torch.randn(256, 64), nn.Module(), Core()
    model.wrapper = nn.Module()
    model.wrapper.model = core
    before = dsq.stash.measure(lambda: core(x)).nbytes
    dsq.DynamicPrecision(model, "[-,4,-,-]")
    assert dsq.stash.measure(lambda: core(x)).nbytes < 0.4 * before
