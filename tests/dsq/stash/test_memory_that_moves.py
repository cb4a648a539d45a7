"""Parameters and activations that are freed, swapped or written past the version counter between forward and backward:
the gradient is PyTorch's, or an error says which weight is not there."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from dsq.stash.controller import run_under
from dsq.stash.methods.bfp import BlockCodec, _formats
from dsq.stash.saved_forms import HELD, read, split
from dsq.stash.stash import Stash
from tests.dsq.gradients import error, gradient

LEVELS = "[16,16,16,16]"


class Scaled(nn.Module):
    """x by a gain for each feature."""

    def __init__(self, width):
        super().__init__()
        self.gain = nn.Parameter(1 + torch.rand(width))

    def forward(self, x):
        return x * self.gain


KINDS = {
    "layer norm": lambda: nn.LayerNorm(64),
    "RMS norm": lambda: nn.RMSNorm(64),
    "batch norm": lambda: nn.BatchNorm1d(64),
    "group norm": lambda: nn.GroupNorm(8, 64),
    "gain": lambda: Scaled(64),
    "PReLU": lambda: nn.PReLU(64),
}


def made(kind):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), KINDS[kind](), nn.Linear(64, 8))
    for p in net[1].parameters():
        nn.init.uniform_(p, 0.5, 1.5)
    return net, torch.randn(256, 64)


def add_one(parameters):  # as an average that is swapped in, or an asynchronous update
    for p in parameters:
        p.data.add_(1.0)


def swap(parameters):
    for p in parameters:
        p.data = torch.full_like(p, 7.0)


def release(parameters):  # as ZeRO-3's hooks do
    for p in parameters:
        p.data = torch.empty(0)


def free(parameters):  # as FSDP's do
    for p in parameters:
        p.untyped_storage().resize_(0)


@pytest.mark.parametrize("change", [add_one, swap, release, free])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_again_does_not_read_a_weight_that_is_elsewhere(kind, change):
    net, x = made(kind)
    plain = copy.deepcopy(net)
    dsq.DynamicPrecision(net, LEVELS)
    expected = torch.autograd.grad(plain(x).square().mean(), plain[2].weight)[0]
    y = net(x).square().mean()
    change(list(net[1].parameters()))
    assert error(torch.autograd.grad(y, net[2].weight)[0], expected) < 0.02


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_gather_a_weight_for_its_own_layer_alone(kind):
    """DeepSpeed's of ZeRO-3: gathered before a module's forward and backward, released behind both."""
    net, x = made(kind)
    plain = copy.deepcopy(net)
    dsq.DynamicPrecision(net, LEVELS)
    shards = {p: p.data for p in net.parameters()}

    def gather(module, *_):
        for p in module.parameters(recurse=False):
            p.data = shards[p].clone()

    for module in net:
        module.register_forward_pre_hook(gather)
        module.register_forward_hook(lambda module, *_: release(module.parameters(recurse=False)))
        module.register_full_backward_pre_hook(gather)
    assert error(gradient(net, x), gradient(plain, x)) < 0.02


@pytest.mark.parametrize("stash", ["linears", "all"])
@pytest.mark.parametrize("change", [release, free])
def test_a_weight_that_is_not_brought_back_is_an_error(change, stash):
    net = dsq.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), LEVELS, stash=stash)
    y = net(torch.randn(32, 64)).sum()
    change([net[1].weight])
    with pytest.raises(RuntimeError, match=r"a weight of \(64, 64\) must be there for its backward, got .* in 0 bytes"):
        y.backward()


@pytest.mark.parametrize("layer", [nn.LayerNorm(64), nn.Conv1d(64, 8, 1), nn.PReLU(64)], ids=str)
def test_so_it_is_in_every_row(layer):
    net = nn.Sequential(nn.Conv1d(64, 64, 1), copy.deepcopy(layer))
    dsq.stash.apply(net, "bfp")
    y = net(torch.randn(32, 64, 64)).sum()
    free([net[1].weight])
    with pytest.raises(RuntimeError, match="must be there for its backward"):
        y.backward()


@pytest.mark.parametrize("linear", [F.linear, partial(dsq.functional.linear, precision="[8,8,8,8]")])
def test_an_expanded_weight_is_there(linear):
    gain, x = nn.Parameter(torch.randn(64, 1)), torch.randn(32, 64, requires_grad=True)
    controller = dsq.stash.apply(nn.Sequential(nn.Linear(1, 1)), "bfp")
    run_under([(controller, controller.model)], lambda: linear(x, gain.expand(64, 64), None)).sum().backward()
    torch.testing.assert_close(x.grad, gain.sum().expand(32, 64), rtol=0.05, atol=0.05)


class Between(nn.Module):
    """An activation whose result changes before a layer reads it."""

    def __init__(self, write):
        super().__init__()
        self.a, self.b, self.write = nn.Linear(64, 64), nn.Linear(64, 64), write

    def forward(self, x):
        h = F.gelu(self.a(x))
        self.write(h)
        return self.b(h)


def by_data(h):
    h.data[:128] = 1.0


def by_numpy(h):
    h.detach().numpy()[:128] = 1.0


def by_a_collective(h):
    with torch.no_grad():
        torch.distributed.scatter(h, [torch.ones_like(h)], 0)


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("write", [by_data, by_numpy, by_a_collective])
def test_an_activation_written_before_it_is_read_is_not_made_again(write):
    torch.manual_seed(0)
    plain = Between(write)
    net, x = copy.deepcopy(plain), torch.randn(256, 64)
    dsq.DynamicPrecision(net, LEVELS)
    actual, expected = (torch.autograd.grad(model(x).square().mean(), model.b.weight)[0] for model in (net, plain))
    assert error(actual, expected) < 0.02


def test_the_mode_that_allows_mutation_of_saved_tensors_changes_no_gradient():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.SiLU()), torch.randn(256, 64)
    gated = dsq.DynamicPrecision(nn.Sequential(model, Scaled(64))).model
    expected = gradient(gated, x)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        assert error(gradient(gated, x), expected) < 0.05  # layers pack an input of their own under a mode


def value(form):
    return read(*split((form,)))[0][0]


def test_memory_that_was_given_away_is_read_anew_each_time():
    """Also what was given away inside a checkpoint's segment, and cached outside of it."""
    stash = Stash(BlockCodec(_formats(dsq.BFP(8))))
    uncached, cached = (torch.full((32, 64), 1.0) for _ in range(2))
    before = [stash.code(cached, "boundary"), stash.copy(cached)]
    assert stash.code(cached, "boundary").tensors is before[0].tensors
    stash.enter_segment(object())
    for x in (uncached, cached):
        stash.never_cache(x)
    stash.enter_segment(None)
    for x in (uncached, cached):
        for number in (2.0, 3.0):
            x.data.fill_(number)
            assert [float(value(form).mean()) for form in (stash.code(x, "boundary"), stash.copy(x))] == [number] * 2
    assert [float(value(form).mean()) for form in before] == [1.0, 1.0]


def test_only_the_version_that_was_passed_to_leave_exact_stays_exact():
    stash, x = Stash(BlockCodec(_formats(dsq.BFP(4)))), torch.randn(32, 64)
    x.add_(1)
    stash.leave_exact(x)
    assert stash.code(x, "boundary") is x
    x.add_(1)
    assert stash.code(x, "boundary") is not x


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.head, self.aux = nn.LayerNorm(32), nn.Linear(32, 8), nn.Linear(32, 8)

    def forward(self, x):
        y = self.norm(x)
        return self.head(y), self.aux(y)


def test_a_value_held_for_a_reader_that_gets_no_gradient_goes_with_the_next_forward():
    model = TwoHeads()
    dsq.stash.apply(model, "bfp", bits=4)
    x = torch.randn(64, 32, requires_grad=True)
    loss = model(x)[0].square().mean()  # the graph holds the value as long as the loss lives
    loss.backward()
    held = [shared for shared in HELD if shared.held is not None]
    model(x)
    assert held
    assert not HELD
    assert all(shared.held is None for shared in held)
