"""dsq.report: FLOPs, layers never called, modules left, bytes; and the model stays as it was."""

import json
import warnings
from itertools import cycle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from dsq.skipped import skipped_modules

CONFIG = dsq.DSQConfig(levels="[4,4,4,16]", stash="linears")


class Odd(nn.Module):
    """Layers that are called, excluded and read past, a convolution, experts, and a product of its own."""

    def __init__(self):
        super().__init__()
        self.called, self.bypassed = nn.Linear(64, 64), nn.Linear(64, 64, bias=False)
        self.head = nn.Linear(64, 64)
        self.conv = nn.Conv1d(64, 64, 1)
        self.experts = nn.Parameter(torch.randn(2, 64, 64))
        self.norm, self.drop = nn.BatchNorm1d(64), nn.Dropout(0.5)

    def forward(self, x):
        x = F.relu(self.drop(self.norm(self.called(x))))
        x = self.head(F.linear(x, self.bypassed.weight))
        return {"loss": torch.tensordot(x, self.experts, ([1], [1])).square().mean(), "logits": x}


def test_a_report_of_a_plain_model_says_that_nothing_was_converted():
    text = str(dsq.report(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), torch.randn(2, 8, 16)))
    assert "0 converted" in text
    assert "dsq.DynamicPrecision(model) before the report" in text
    assert "skipped: self_attn to linear2, 4 modules: excluded, an adapter" in text


def test_a_report_counts_quantized_products_names_the_rest_and_changes_nothing():
    net = dsq.convert(Odd(), dsq.DSQConfig(levels="[4,4,4,16]", exclude="head", stash="linears"))
    net.called.weight.grad = gradient = torch.ones(64, 64)
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    report = dsq.report(net, torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))
    product = 2 * 32 * 64 * 64
    assert (report.forward.quantized, report.forward.total) == (product, 5 * product)
    assert (report.backward.quantized, report.backward.total) == (product, 9 * product)  # x needs no gradient
    assert report.uncalled == ("bypassed",)
    whys = {entry.name: entry.reason for entry in report.skipped}
    assert set(whys) == {"", "head", "conv"}
    assert "three dimensions" in whys[""]
    assert "convolution" in whys["conv"]
    assert "excluded" in whys["head"]
    # the batch is the caller's and no stash, but its packed form is: codes, scales and that of the tensor
    assert report.stash_bytes == report.unconverted_stash_bytes + 32 * 64 * 4.5 / 8 + 1
    text = str(report)
    assert "20.0%" in text
    assert "never called: bypassed" in text
    assert json.loads(json.dumps(report.as_dict()))["forward"]["quantized"] == product
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.called.weight.grad is gradient
    assert torch.equal(torch.get_rng_state(), state)
    assert list(dsq.converted(net)) == ["", "called", "bypassed"]


def test_a_report_calls_a_share_packed_where_products_are_not_quantized():
    for level, title in (("[4,4,4,8]", "quantized"), ("[-,4,-,-]", "packed")):
        net = dsq.convert(nn.Sequential(nn.Linear(64, 64)), level)
        assert str(dsq.report(net, torch.randn(8, 64))).splitlines()[0].split() == ["pass", "GFLOP", title, "others"]


def test_tokens_positions_and_gains_of_vision_models_are_no_products_that_were_left():
    net = nn.Sequential(nn.Linear(16, 16), nn.Conv1d(16, 1, 3))
    for at, shape in enumerate([(1, 1, 16), (1, 5, 16), (1, 16, 1, 1), (16, 1, 1)]):
        net.register_parameter(f"added{at}", nn.Parameter(torch.randn(shape)))
    assert [entry.name for entry in skipped_modules(dsq.convert(net, stash="linears"))] == ["1"]


class Router(nn.Linear):
    top_k = 1


def test_a_module_that_an_option_skipped_is_said_to_be_excluded_whatever_its_class():
    skipped = nn.ModuleDict(
        {"experts": Odd(), "patches": nn.Conv2d(3, 8, 2, 2), "subclass": type("L", (nn.Linear,), {})(8, 8)}
    )
    skipped["with top_k"] = nn.Linear(8, 8)
    skipped["with top_k"].top_k = 2
    net = nn.ModuleDict({"skipped": skipped, "layer": nn.Linear(256, 256), "router": Router(8, 4)})
    reasons = {entry.name: entry.reason for entry in skipped_modules(dsq.convert(net, exclude="skipped"))}
    excluded = {name for name, reason in reasons.items() if reason.startswith("excluded")}
    assert excluded == {
        f"skipped.{name}"
        for name in (
            "experts",
            "experts.called",
            "experts.bypassed",
            "experts.head",
            "patches",
            "subclass",
            "with top_k",
        )
    }
    assert reasons["router"].startswith("a router")


class Halves(torch.autograd.Function):
    """As a reversible layer: its forward calls a module on a part of its input."""

    @staticmethod
    def forward(ctx, x, layer):
        with torch.no_grad():
            return layer(x.chunk(2, -1)[0])

    @staticmethod
    def backward(ctx, dy):
        return torch.cat([dy, dy], -1), None


class Reversible(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.layer = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x):
        return Halves.apply(self.first(x), self.layer)


def test_modules_that_an_autograd_function_calls_are_counted():
    report = dsq.report(dsq.convert(Reversible(), stash="linears"), torch.randn(8, 32))
    assert report.forward.quantized == report.forward.total == 2 * 8 * 32 * (64 + 32)


class Wrapper(nn.Module):
    """Passes on what it gets, as those of PEFT, torch.compile, DDP and DataParallel do."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


class Named(nn.Module):
    """A model that takes what Hugging Face's data collators give, with a recurrent layer."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(64, 64), nn.Linear(64, 64)

    def forward(self, values, labels=None):
        return {"loss": (self.head(self.lstm(values)[0]) - labels).square().mean()}


def test_a_batch_of_the_forwards_names_is_given_as_keywords():
    batch = {"values": torch.randn(32, 64), "labels": torch.zeros(32, 64)}
    net = Named()
    entry = dsq.workload.trace(net, batch)
    for wrap in (Wrapper, nn.DataParallel):
        assert dsq.workload.trace(wrap(Wrapper(net)), batch)["operations"]
    with pytest.warns(
        UserWarning, match="of the parameters that are multiplied are of LSTM, whose saved tensors stay exact"
    ):
        dsq.DynamicPrecision(net)
    report = dsq.report(net, batch)
    assert report.forward.quantized == dsq.report(Wrapper(net), batch).forward.quantized == 2 * 32 * 64 * 64
    assert [operation["op"] for operation in entry["operations"]].count("gemm") > 0
    (lstm,) = report.skipped
    assert (lstm.name, lstm.reason.split(",")[0]) == ("lstm", "its products are inside of one operation of PyTorch's")
    with pytest.raises(AttributeError, match="dict"):  # of another key: it is the first argument, as it stands
        dsq.report(net, {"x": batch["values"]})
    with pytest.raises(AttributeError, match="dict"):
        dsq.report(Wrapper(net), {"x": batch["values"]})


def test_seconds_are_of_the_model_as_it_is_and_as_it_was(monkeypatch):
    net = dsq.convert(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), CONFIG)
    now, first = 0.0, cycle((0, 100, 100, 100))  # what the first of two runs takes besides

    def work(layer, _):  # by the clock below
        nonlocal now
        now += 3 if isinstance(layer, dsq.Linear) else 2

    for layer in net:
        layer.register_forward_pre_hook(work)
    monkeypatch.setattr("dsq.conversion_report.wall_clock", lambda: now + next(first))
    report = dsq.report(net, torch.randn(4, 16))
    assert (report.seconds, report.unconverted_seconds) == (6, 4)
    assert "4000 ms before, 6000 ms now (1.50 x; equal runs differ by up to 1.00 x)" in str(report)


class Cosine(nn.Module):
    """An operation that gets no rule: of rounded large arguments it is another number."""

    def forward(self, x):
        return x.cos()


def test_operations_that_a_packed_stash_leaves_exact_are_named():
    net = nn.Sequential(nn.Linear(32, 64), Cosine(), nn.Linear(64, 32))
    assert "of it unpacked" not in str(dsq.report(dsq.convert(net, stash="linears"), torch.randn(32, 32)))
    report = dsq.report(dsq.convert(dsq.unconvert(net), stash="all"), torch.randn(32, 32))
    assert "of it unpacked, by operations without a rule in dsq/stash/rules: Cos" in str(report)
    assert report.unpacked_bytes == {"Cos": 4 * 32 * 64}


def test_blocks_compiled_by_themselves_are_counted_as_eager_ones():
    net = dsq.convert(nn.Sequential(nn.TransformerEncoderLayer(64, 2, 128, dropout=0.0)), CONFIG)
    x = torch.randn(8, 4, 64)
    eager = dsq.report(net, x)
    net[0].compile(backend="aot_eager")
    dsq.stash.apply(net, "bfp")
    report = dsq.report(net, x)
    assert report.forward == eager.forward
    assert report.backward.quantized == eager.backward.quantized
    assert report.backward.floating_point["aten.bmm"] > eager.backward.floating_point["aten.bmm"]
    assert "graphs save tensors exact" in str(report)
    torch.compiler.reset()


def test_a_compiled_model_is_reported_without_a_warning_of_pytorchs():
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert dsq.report(torch.compile(nn.Linear(8, 8), backend="eager"), torch.randn(4, 8)).forward.total


@pytest.mark.parametrize(("largest", "unlike"), [(1.0, ()), (1000.0, ("0",))])
def test_layers_that_read_features_of_unlike_scales_are_named(largest, unlike):
    net = dsq.convert(nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 1)), stash="linears")
    report = dsq.report(net, torch.rand(64, 10) * torch.tensor([1.0] * 9 + [largest]))
    assert report.mixed_scale == unlike
    assert ("mixed scale" in str(report)) == bool(unlike)


def test_transforms_of_the_stash_are_named():
    net = dsq.convert(nn.Linear(64, 32), levels="[8 8 | 8 8 | mxfp4@r16 mxfp4@r16]", stash="linears")
    report = dsq.report(net, torch.randn(8, 64))
    assert report.forward.floating_point == {"dsq.hadamard": 2 * 8 * 64 * 8}  # runs of the 8 tokens there are
    assert "hadamard 20.0%" in str(report)
