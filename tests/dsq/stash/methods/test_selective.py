"""selective: gradients equal PyTorch's bit for bit, whatever the layer's options and whoever needs a gradient."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dsq.stash import apply, measure
from dsq.stash.controller import applied
from tests.dsq.gradients import same, step


@pytest.fixture(autouse=True)
def _dropped_memory_is_nan():
    """PyTorch fills uninitialized memory with NaN in deterministic mode: a dropped tensor that is read shows."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Functional(nn.Module):
    def __init__(self, *functions):
        super().__init__()
        self.functions = functions

    def forward(self, x):
        for function in self.functions:
            x = function(x)
        return x


class Shared(nn.Module):
    """One layer under two names, run twice."""

    def __init__(self):
        super().__init__()
        self.a = self.b = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        return self.norm(self.b(F.relu(self.norm(self.a(x)))))


def seq(*layers):
    return nn.Sequential(*layers)


LAYERS = {
    "conv2d channels last": (nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), (2, 4, 9, 9)),
    "batch norm, no running statistics, eval": (nn.BatchNorm2d(4, track_running_stats=False).eval(), (2, 4, 9, 9)),
    "relu in place": (seq(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 1)), (2, 4, 9)),
    "dropout in place": (seq(nn.Conv1d(4, 4, 3), nn.Dropout(0.3, inplace=True)), (2, 4, 9)),
    "average pool 2d, channels last": (
        seq(nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last), nn.AvgPool2d(3, 2, 1, count_include_pad=False)),
        (2, 4, 9, 9),
    ),
    "functions": (Functional(F.relu, torch.sin, F.relu6, F.dropout, torch.relu, lambda x: x.neg().relu_()), (2, 4, 9)),
    "function max-pool": (Functional(torch.sin, lambda x: F.max_pool2d(x, 2), F.leaky_relu), (2, 4, 9, 9)),
    "shared": (Shared(), (2, 4, 9, 9)),
    "attention": (nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True), (3, 5, 8)),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_gradients_are_pytorchs(layer):
    module, shape = LAYERS[layer]
    x = torch.randn(shape)
    if len(shape) == 4 and next(iter(module.parameters()), x).is_contiguous(memory_format=torch.channels_last):
        x = x.contiguous(memory_format=torch.channels_last)
    parameters = [name for name, _ in module.named_parameters()]
    for needs_x, *needs in itertools.product((True, False), repeat=1 + min(len(parameters), 2)):
        model = seq(copy.deepcopy(module)).train(module.training)
        for i, p in enumerate(model.parameters()):
            p.requires_grad_(needs[min(i, 1)] if needs else False)
        if not needs_x and not any(p.requires_grad for p in model.parameters()):
            continue
        plain, model = model, copy.deepcopy(model)
        apply(model, "selective")
        x.requires_grad_(needs_x)
        assert same(step(model, x), step(plain, x))
        assert same(list(model.buffers()), list(plain.buffers()))


def kept(model, x):
    return measure(lambda: model(x.clone()).sum()).nbytes  # a batch that was there before would not count


def test_kept_bytes_follow_who_needs_a_gradient():
    """conv -> batch norm -> ReLU -> conv -> max-pool, counted by hand; N floats a plane."""
    model = seq(nn.Conv2d(8, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.MaxPool2d(2))
    apply(model, "selective")
    x = torch.randn(2, 8, 16, 16)
    full, mask, indices, channel = 4 * x.numel(), x.numel() // 8, x.numel() // 4 * 2, 4 * 8
    assert kept(model, x) == 3 * full + 2 * channel + mask + indices  # both convs' and the norm's inputs
    model.requires_grad_(False)
    x.requires_grad_()
    assert kept(model, x) == full + 2 * channel + mask + indices  # the norm's input
    model.eval()
    assert kept(model, x) == mask + indices
    assert applied(model)["selective"].report().saved_bytes == mask + indices
    model[1].weight.requires_grad_()
    assert kept(model, x) == full + mask + indices
    model.requires_grad_(False)
    model[3].weight.requires_grad_()
    assert kept(model, x) == full + mask + indices  # the second conv's input


def test_infinities_and_nans_pass_as_in_pytorch():
    values = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.0, -1.0, 6.0, 0.5]
    x = torch.tensor(values).repeat(64).requires_grad_()  # whole vectors: PyTorch's scalar tail lets a NaN through more
    inf = float("inf")
    limits = [(-1.0, 1.0), (-inf, 3.0), (-1.0, inf), (-inf, inf)]
    hardtanh = [Functional(lambda x, low=low, high=high: F.hardtanh(x, low, high)) for low, high in limits]
    for module in (nn.ReLU(), nn.ReLU6(), nn.LeakyReLU(), *hardtanh):
        model = seq(module)
        (theirs,) = torch.autograd.grad(model(x).sum(), x)
        apply(model, "selective")
        assert torch.equal(*torch.autograd.grad(model(x).sum(), x), theirs)
