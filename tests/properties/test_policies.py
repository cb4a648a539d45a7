"""Stash policies on models of any sizes: the gradient, what remove() gives back, and the bytes that are counted."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dsq
from tests.dsq.gradients import all_gradients, gradient, same, step

sizes = st.integers(1, 40)
acts = st.sampled_from([nn.ReLU, nn.GELU, nn.Tanh, nn.SiLU])


def model_of(K: int, H: int, act: type[nn.Module]) -> nn.Module:
    torch.manual_seed(K * 41 + H)
    return nn.Sequential(nn.Linear(K, H), act(), nn.LayerNorm(H), nn.Linear(H, 3))


@settings(max_examples=25)
@given(sizes, sizes, sizes, acts)
def test_selective_and_checkpoint_change_no_gradient(T: int, K: int, H: int, act: type[nn.Module]) -> None:
    model, x = model_of(K, H, act), torch.randn(T, K, generator=torch.Generator().manual_seed(T))
    plain = step(model, x)
    for policy, options in (("selective", {}), ("checkpoint", {"segments": "^1$"})):
        controller = dsq.stash.apply(model, policy, **options)
        assert same(step(model, x), plain), policy
        controller.remove()
    assert same(step(model, x), plain)


@settings(max_examples=25)
@given(sizes, sizes, sizes, acts, st.integers(6, 12))
def test_gradients_of_packed_tensors_are_near(T: int, K: int, H: int, act: type[nn.Module], bits: int) -> None:
    model, x = model_of(K, H, act), torch.randn(T, K, generator=torch.Generator().manual_seed(T))
    plain, exact = step(model, x), all_gradients(model).clone()
    controller = dsq.stash.apply(model, "bfp", bits=bits)
    assert (gradient(model, x) - exact).norm() <= 2.0 ** (4 - bits) * exact.norm() + 1e-6
    controller.remove()
    assert same(step(model, x), plain)
    assert not list(filter(None, (module._forward_hooks or module._forward_pre_hooks for module in model.modules())))
