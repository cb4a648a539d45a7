"""One storage seen twice: what is the same memory is kept once, and what is not has its own values."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from tests.dsq.gradients import error, same
from tests.dsq.stash.rules.exactly import under_the_table

#: two inputs of layers, of one storage and offset, of (1, 1024) values in it
SEEN = {
    "as another dtype": lambda x: (lambda h: (h, h.view(torch.bfloat16)))(x.half()),
    "as a conjugate": lambda x: (x.view(torch.complex64).imag, x.view(torch.complex64).conj().imag),
    "with gaps": lambda x: (x[:, ::2], x[:, :512]),
    "transposed": lambda x: (x.view(32, 32), x.view(32, 32).T),
    "of other rows": lambda x: (x.view(2, 512), x.view(4, 256)),
    "of the first rows": lambda x: (x.view(2, 512), x.view(2, 512)[:1]),
}


@pytest.mark.parametrize("case", SEEN)
def test_two_views_of_a_storage_have_their_own_values(case):
    inputs = SEEN[case](torch.randn(1, 1024))
    weights = [torch.randn(3, x.shape[-1]).to(x.dtype).requires_grad_() for x in inputs]
    layers = lambda: sum(F.linear(x, w).float().sum() for x, w in zip(inputs, weights, strict=True))  # noqa: E731
    y, _ = under_the_table(layers)
    assert same(torch.autograd.grad(y, weights), torch.autograd.grad(layers(), weights))


@pytest.mark.parametrize("stash", ["linears", "all"])
def test_an_inference_tensor_is_coded_for_each_of_its_states(stash):
    with torch.inference_mode():
        x = torch.randn(16, 64)
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = layers

        def forward(self, x):
            y = self.layers[0](x.t().contiguous().t()) + x  # PyTorch moves and adds them
            with torch.inference_mode():
                x.add_(1)
            return y + self.layers[1](x)

    before = x.clone()
    dsq.convert(Model(), dsq.DSQConfig("[16,8,16,16]", stash=stash))(x).sum().backward()
    for layer, value in zip(layers, (before, before + 1), strict=True):
        assert error(layer.weight.grad, torch.ones(16, 64).t() @ value) < 0.02


def test_what_is_kept_exact_is_counted_once():
    x, index = torch.randn(20, 20, requires_grad=True), torch.arange(20).expand(20, 20).clone()
    _, stash = under_the_table(lambda: torch.gather(x, 0, index) + torch.gather(x, 1, index))
    assert stash.bytes.saved == index.nbytes
