"""Stash policies on models of any sizes: the gradient, what remove() gives back, and the bytes that are counted."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import dsq

sizes = st.integers(1, 40)
acts = st.sampled_from([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU])


def model_of(K: int, H: int, act: type[nn.Module]) -> nn.Module:
    torch.manual_seed(K * 41 + H)
    return nn.Sequential(nn.Linear(K, H), act(), nn.LayerNorm(H), nn.Linear(H, 3))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    model(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@settings(max_examples=25)
@given(sizes, sizes, sizes, acts)
def test_selective_and_checkpoint_change_no_gradient(T: int, K: int, H: int, act: type[nn.Module]) -> None:
    model, x = model_of(K, H, act), torch.randn(T, K, generator=torch.Generator().manual_seed(T))
    plain = gradients(model, x)
    for policy, options in (("selective", {}), ("checkpoint", {"segments": "^1$"})):
        controller = dsq.stash.apply(model, policy, **options)
        assert all(map(torch.equal, gradients(model, x), plain)), policy
        controller.remove()
    assert all(map(torch.equal, gradients(model, x), plain))


@settings(max_examples=25)
@given(sizes, sizes, sizes, acts, st.integers(6, 12))
def test_gradients_of_packed_tensors_are_near(T: int, K: int, H: int, act: type[nn.Module], bits: int) -> None:
    model, x = model_of(K, H, act), torch.randn(T, K, generator=torch.Generator().manual_seed(T))
    plain = gradients(model, x)
    controller = dsq.stash.apply(model, "bfp", bits=bits)
    packed = gradients(model, x)
    controller.remove()
    error = math.sqrt(sum((a - b).square().sum().item() for a, b in zip(packed, plain, strict=True)))
    norm = math.sqrt(sum(b.square().sum().item() for b in plain))
    assert error <= 2.0 ** (4 - bits) * norm + 1e-6
    assert all(map(torch.equal, gradients(model, x), plain))
    assert not list(filter(None, (module._forward_hooks or module._forward_pre_hooks for module in model.modules())))
