"""Modules that multiply in their own forward: those products are quantized, and nothing else changes."""

import copy
import json

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dsq
from dsq.ops.products import attention, matmul_of_activations
from dsq.skipped import skipped_modules
from tests.dsq.gradients import saving
from tests.dsq.layers.kinds import Own, drawn, made

CONFIG = dsq.DSQConfig(levels="[4,4,4,16]", attention=True, stash="linears")
X, IMAGE = drawn(2, 24, 32), drawn(2, 48, 32)


def test_attentions_products_are_those_of_quantized_attention():
    net = dsq.convert(made("own attention"), CONFIG)
    q, k, v = (t.view(2, 24, 2, 16).transpose(1, 2) for t in net[0].qkv(X).chunk(3, -1))
    expected, _ = attention(q, k, v, CONFIG.at(0).activation_matmuls, is_causal=True)
    assert torch.equal(net(X), expected.transpose(1, 2).flatten(2))


def test_attention_stays_plain_where_it_is_not_asked_for_or_in_an_unquantized_evaluation():
    assert type(dsq.convert(made("own attention"), dsq.DSQConfig(levels="[4,4,4,16]", stash="linears"))[0]) is Own
    net = dsq.convert(
        made("own attention"), dsq.DSQConfig("[4,4,4,16]", attention=True, eval_full_precision=True, stash="linears")
    )
    assert torch.equal(net.eval()(X), made("own attention").eval()(X))


class Sampled(nn.Module):
    """A language model whose head and ``generate`` are no attention; its attention is in a method of the forward's."""

    def __init__(self):
        super().__init__()
        self.attend, self.head = Weighed(), nn.Linear(32, 32)

    def forward(self, x):
        return self.head(self.attend(x) @ torch.ones(2, 32, 32))

    def generate(self, x):
        return self(x).softmax(-1)


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(32, 32)

    def forward(self, x):
        return self.weights(self.project(x)) @ x

    def weights(self, q):
        return (q @ q.mT).softmax(-1)


def test_attention_is_what_a_forward_and_its_own_methods_weigh_by_a_softmax():
    net = dsq.convert(Sampled(), CONFIG)
    q, matmuls = net.attend.project(X), CONFIG.at(0).activation_matmuls
    weighed = matmul_of_activations(matmul_of_activations(q, q.mT, matmuls).softmax(-1), X, matmuls)
    assert torch.equal(net(X), net.head(weighed @ torch.ones(2, 32, 32)))


def test_the_products_of_fairseqs_attention():
    net = dsq.convert(made("fairseq's attention"), CONFIG)
    matmuls = CONFIG.at(0).activation_matmuls
    weights = matmul_of_activations(net.q_proj(X), X.mT, matmuls).softmax(-1)
    assert torch.equal(net(X), matmul_of_activations(weights, X, matmuls))
    assert not dsq.unconvert(net).skip_embed_dim_check


def test_products_with_parameters_are_linear_layers_of_the_same_bits_with_a_packed_stash():
    config = dsq.DSQConfig(levels="[4,4,4,16]", stash="linears")
    net = dsq.convert(made("linear of a parameter"), config)
    y = dsq.functional.linear(IMAGE, net.a, torch.ones(64), config.at(0))
    y = dsq.functional.linear(y, net.b.t(), None, config.at(0))
    actual, saved_tensors = saving(net, IMAGE)
    assert torch.equal(actual, y)
    assert sum(t.nbytes for t in saved_tensors if t.dtype == torch.uint8) == 96 * (32 + 64) * 4.5 / 8 + 2


@pytest.mark.parametrize("kind", ["bmm", "grouped"])
def test_several_small_matrices_multiply_plain_the_report_says_so_and_the_policy_packs_their_stash(kind):
    plain = made(kind)
    net = dsq.convert(copy.deepcopy(plain), CONFIG)
    assert torch.equal(net(IMAGE), plain(IMAGE))
    report = dsq.report(net, IMAGE)
    assert (report.forward.quantized, report.small_flops) == (0, report.forward.total)
    assert "in floating point: 100.0% of the forward" in str(report)
    assert "bmm:" not in str(report)
    assert report.skipped == ()  # with more rows they are quantized
    before = dsq.stash.measure(lambda: plain(IMAGE.sin()).sum()).nbytes
    packed = dsq.convert(plain, dsq.DSQConfig(levels="[4,4,4,16]", stash="all"))
    assert dsq.stash.measure(lambda: packed(IMAGE.sin()).sum()).nbytes < 0.2 * before


def test_each_group_is_quantized_by_its_own_size(monkeypatch):
    net = dsq.convert(made("grouped"), CONFIG)
    monkeypatch.setattr("dsq.layers.own_products.MIN_QUANTIZED_MACS", 50 * 32 * 64)  # between 40 and 56 rows
    rows = IMAGE.flatten(0, 1)
    first = F.linear(F.linear(rows[:40], net.a[0].mT), net.b[0].mT)
    second = dsq.functional.linear(rows[40:], net.a[1].mT, None, CONFIG.at(0))
    second = dsq.functional.linear(second, net.b[1].mT, None, CONFIG.at(0))
    assert torch.equal(net(IMAGE), 2 * torch.cat([first, second]))


def test_groups_of_any_size_are_quantized_at_a_level_of_named_formats():
    net = dsq.convert(made("grouped"), "mxfp8")
    rows = IMAGE.flatten(0, 1)
    expected = [
        dsq.functional.linear(dsq.functional.linear(x, a.mT, None, "mxfp8"), b.mT, None, "mxfp8")
        for x, a, b in zip((rows[:40], rows[40:]), net.a, net.b, strict=True)
    ]
    assert torch.equal(net(IMAGE), 2 * torch.cat(expected))


class Scaled(nn.Module):
    """Matrices of its own that it does not multiply by, beside a layer that it does."""

    def __init__(self):
        super().__init__()
        self.places, self.linear = nn.Parameter(torch.randn(24, 32)), nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x + self.places)


def test_after_a_forward_without_own_products_no_mode_is_entered():
    net = dsq.convert(Scaled(), dsq.DSQConfig(levels="[4,4,4,16]", stash="linears"))
    first = net(X)
    assert net.idle
    assert torch.equal(net(X), first)
    assert [entry.kind for entry in skipped_modules(net)] == ["Scaled"]
    assert "idle" not in dsq.unconvert(net).__dict__


class Branch(Scaled):
    """Multiplies by its matrices in some forwards only, as with layer drop, a warm-up or a branch of training alone."""

    def forward(self, x, multiplies):
        return x @ self.places.mT if multiplies else x + 1


@pytest.mark.parametrize("first", ["T-", "T-" * 9, "E-" * 40, "T+T-T-T-E-"])
def test_a_module_multiplies_in_another_forward_than_its_first(first):
    """T, E: in training or evaluation mode; +: it multiplies."""
    net = dsq.convert(Branch(), dsq.DSQConfig(levels="[4,4,4,16]", stash="linears"))
    for mode, sign in zip(first[::2], first[1::2], strict=True):
        net.train(mode == "T")(X, sign == "+")
    expected = dsq.functional.linear(X, net.places, None, net.quantizers)
    for _ in range(4):
        assert torch.equal(net.train()(X, True), expected)
    assert not skipped_modules(net)
    assert not {"idle", "multiplied", "training_forwards", "evaluation_forwards"}.intersection(vars(dsq.unconvert(net)))


def test_a_resumed_run_and_a_check_of_the_gradient_leave_which_forwards_are_watched():
    def trained(steps, state=None, checks=False):
        torch.manual_seed(0)
        net = Branch()
        dynamic = dsq.DynamicPrecision(net, "[4,4,4,16]", stash="linears")
        if state is not None:
            net.load_state_dict(state[0])
            dynamic.load_state_dict(json.loads(json.dumps(state[1])))
        for step in steps:
            if checks:
                dynamic.check(lambda: net(X, True).square().mean(), every=1)
            net(X, step in (3, 43)).square().mean().backward()
            if step in (3, 43):
                net.places.data -= net.places.grad
            net.zero_grad()
            dynamic.record()
        return copy.deepcopy(net.state_dict()), dynamic.state_dict()

    for first, pause in ((0, 19), (4, 30)):  # step 43 is watched, because step 3 multiplied, and is not
        state, unbroken = trained(range(first, pause)), trained(range(first, 44))[0]["places"]
        assert list(state[1]) == ["config", "scheduler", "own_products"]
        assert torch.equal(trained(range(pause, 44), state)[0]["places"], unbroken)
        assert torch.equal(trained(range(first, 44), checks=True)[0]["places"], unbroken)
    with pytest.raises(ValueError, match="state of module '' must be a dictionary with the keys"):
        trained([], (state[0], state[1] | {"own_products": {"": {"idle": 1}}}))


def test_a_checkpointed_forward_without_the_mode_is_recomputed_without_it():
    net = dsq.convert(Branch(), dsq.DSQConfig(levels="[4,4,4,16]", stash="linears"))
    for _ in range(31):
        net(X, False)
    checkpoint(net, X, True, use_reentrant=False).sum().backward()
    assert net.idle
    assert net.training_forwards == 32  # the backward's


def test_sparse_features_are_multiplied_plain():
    """As in the first layer of a graph network, whose features are words."""

    class GraphConvolution(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.eye(32))

        def forward(self, x):
            return torch.mm(x, self.weight)

    net, words = dsq.convert(nn.Sequential(GraphConvolution(), nn.Linear(32, 4)), CONFIG), drawn(8, 32).relu()
    assert torch.equal(net[0](words.to_sparse()), words)
    assert "0" in dsq.converted(net)
