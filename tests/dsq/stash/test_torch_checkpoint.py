"""Checkpoints inside of checkpoints, and the private parts of torch.utils.checkpoint that dsq uses."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

from dsq import DynamicPrecision
from dsq.ops import torch_checkpoint
from dsq.stash import apply, segment_inputs
from tests.dsq.gradients import all_gradients, error, gradient, step

WIDTH = 32
segment_of = partial(checkpoint, use_reentrant=False)


def block():
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


class Nested(nn.Module):
    """Blocks in a segment. Capital letters of ``order`` are segments inside of it."""

    def __init__(self, order):
        super().__init__()
        self.order, self.first = order, nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleDict({name: block() for name in "abc"})

    def inner(self, name, x):
        run = self.blocks[name.lower()]
        return segment_of(lambda x: x + segment_of(run, x), x) if name.isupper() else x + run(x)

    def outer(self, x):
        unit = F.layer_norm(x, (WIDTH,))
        for name in self.order:
            x = self.inner(name, x) + unit  # which is read before inner segments and after
        return x * unit

    def forward(self, x):
        x = self.first(x) - torch.ones(WIDTH)  # as exact as a residual
        return segment_of(self.outer, x)


@pytest.mark.parametrize("early_stop", [True, False])
def test_the_gradient_does_not_depend_on_which_blocks_are_segments_inside_a_segment(early_stop):
    x, gradients = torch.randn(4, 24, WIDTH), []
    for order in ("abc", "ABC", "abC", "aBc", "AbC"):
        torch.manual_seed(0)
        model = Nested(order)
        with set_checkpoint_early_stop(early_stop):
            exact = gradient(copy.deepcopy(model), x)
            apply(model, "bfp")
            gradients.append(gradient(model, x))
        assert 0 < error(gradients[-1], exact) < 0.1
        assert error(gradients[-1], gradients[0]) < 0.05


def test_segments_may_call_parts_of_the_model_and_not_the_model():
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(6)]
    model, x = nn.Sequential(*parts), torch.randn(64, WIDTH)
    exact = gradient(model, x)
    DynamicPrecision(model, "[-,4,-,-]")
    step(model, x, run=partial(checkpoint_sequential, model, 2, use_reentrant=False))
    packed = all_gradients(model)
    assert 0 < error(packed, exact) < 0.1


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.router, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2), nn.Linear(WIDTH, WIDTH)

    def routed(self, x):
        rows = self.router(x).argmax(-1).nonzero()[:, 0]
        return x.index_add(0, rows, self.experts(x[rows]))

    def forward(self, x):
        return segment_of(lambda x: segment_of(self.routed, F.gelu(x)), self.first(x))


def test_a_router_in_an_inner_segment_gets_the_exact_inputs_of_the_outer_one():
    model, x = Routed(), torch.randn(256, WIDTH)
    exact = gradient(copy.deepcopy(model), x)
    apply(model, "bfp")
    assert 0 < error(gradient(model, x), exact) < 0.05


def test_a_segment_is_found_while_its_forward_runs_alone():
    segments = []

    def run(x):
        segments.append(torch_checkpoint.segment_now())
        return x.sin().cos()

    x = torch.randn(3, requires_grad=True)
    y = segment_of(run, x)
    outer, *_ = segments
    assert not torch_checkpoint._MISSING
    assert torch_checkpoint.segment_now() is None
    assert not torch_checkpoint.is_open(outer)
    assert torch.equal(segment_inputs.inputs_of(outer)[0].unpack(), x)
    calls = []

    def around(name, run, *inputs):
        calls.append((name, inputs))
        run(*inputs)

    torch_checkpoint.recompute_under(outer, around, "policies")
    assert torch_checkpoint.is_wrapped(outer, around)
    segment_inputs.set_inputs(outer, [torch.ones(3, requires_grad=True)])
    y.sum().backward()
    assert [name for name, _ in calls] == ["policies"]
    assert segments[1:] == [None]  # recomputed
    assert torch.equal(x.grad, -torch.ones(3).sin().sin() * torch.ones(3).cos())


def test_checkpoints_of_an_unknown_pytorch_end_in_one_line(monkeypatch):
    monkeypatch.setattr(torch_checkpoint, "_ATTRIBUTES", ("recompute_fn", "renamed"))
    _, missing = torch_checkpoint._pack_code()
    assert missing == "_CheckpointFrame.renamed"
    monkeypatch.setattr(torch_checkpoint, "_MISSING", missing)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block())
    apply(model, "bfp")
    model(torch.randn(4, WIDTH))
    model[1].forward = partial(segment_of, model[1].forward)
    with pytest.raises(RuntimeError, match=r"does not know the checkpoints of PyTorch .*missing _CheckpointFrame"):
        model(torch.randn(4, WIDTH))


@pytest.mark.parametrize("stash", ["all", "linears"])
@pytest.mark.parametrize("schedule", ["[8,4,8,8] [8,8,8,8]", "[8,4,4,8] [16,4,4,8]"])
def test_a_level_that_rises_before_the_backward_of_a_checkpoint_is_refused(schedule, stash):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), block())
    model[1].forward = partial(segment_of, model[1].forward)
    dynamic = DynamicPrecision(model, schedule, rise_at=1, total_updates=9, stash=stash)
    loss = model(torch.randn(64, WIDTH)).sum()
    dynamic.record()
    with pytest.raises(RuntimeError, match=r"level must not change .* after backward\(\)$"):
        loss.backward()
    model(torch.randn(64, WIDTH)).sum().backward()
