"""ReLU whose backward reads bits: the gradient is PyTorch's, bit for bit, or PyTorch's own op runs."""

import pytest
import torch
from torch.nn import functional as F

from dsq.stash.saved_tensors.hooks import op_hooks
from dsq.stash.saved_tensors.rules.few_bits import RELU_FAMILY
from dsq.stash.saved_tensors.rules.function_mode import Rules

NAMES = {"F.relu": F.relu, "torch.relu": torch.relu, "Tensor.relu": torch.Tensor.relu, "F.relu_": F.relu_}


def edges(*shape, dtype=torch.float32):
    few = torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1, -1, torch.inf, -torch.inf, torch.nan, 0.5], dtype=dtype)
    return few[torch.randint(len(few), shape, generator=torch.Generator().manual_seed(0))]


def ours(function):
    """The function under the rule that keeps a mask (and hooks of ours, whatever others an earlier test left)."""

    def call(*args, **kwargs):
        with op_hooks(lambda tensor: None), Rules(RELU_FAMILY):
            return function(*args, **kwargs)

    return call


def same(a, b):
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.itemsize]
    return torch.equal(a.view(integers), b.view(integers)) and a.stride() == b.stride()


@pytest.mark.parametrize("function", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("gradient_last", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_gradients_are_pytorchs(function, dtype, last, gradient_last):
    def layout(x, channels_last):
        return x.contiguous(memory_format=torch.channels_last) if channels_last else x

    dy = layout(edges(2, 5, 3, 7, dtype=dtype).flip(0), gradient_last)
    found = []
    for relu in (function, ours(function)):
        x = layout(edges(2, 5, 3, 7, dtype=dtype), last).requires_grad_()
        y = relu(x * 1)
        found.append((y.detach(), *torch.autograd.grad(y, x, dy, retain_graph=True)))
        found[-1] += torch.autograd.grad(y, x, dy)
    assert all(same(a, b) for a, b in zip(*found, strict=True))
    assert y.grad_fn.name() == "MaskedReluBackward"


def test_second_derivatives_are_pytorchs():
    def twice(relu):
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).requires_grad_()
        (first,) = torch.autograd.grad(relu(x * x - 0.2).pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(first.sum(), x)[0]

    assert torch.equal(twice(F.relu), twice(ours(F.relu)))


@pytest.mark.parametrize("function", [F.relu_, lambda x: F.relu(x, inplace=True)])
def test_in_place_writes_into_its_input(function):
    x = torch.randn(64, requires_grad=True)
    y = x * 1
    assert ours(function)(y) is y
    assert y.grad_fn.saved_tensors[0].dtype is torch.uint8
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], (x > 0).float())
    view = (x * 1).view(8, 8)
    y = ours(function)(view)
    assert y.grad_fn.name() != "MaskedReluBackward"
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], (x > 0).float())
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        ours(function)(x)


def test_a_result_changed_in_place_does_not_change_the_gradient():
    x = torch.randn(64, requires_grad=True)
    y = ours(F.relu)(x * 1)
    y.mul_(-1)
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], -(x > 0).float())


def test_no_gradient_stays_no_gradient():
    class Ends(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return None

    x = torch.randn(64, requires_grad=True)
    Ends.apply(ours(F.relu)(x * 1)).sum().backward()
    assert x.grad is None
