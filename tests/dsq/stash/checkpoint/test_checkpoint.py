"""Checkpointing: the gradients of the plain model, less kept, and a recomputed stash that the table's policies pack."""

import copy

import pytest
import torch
from torch import nn

from analysis.models import encoder, resnet20
from dsq.kept import MORE
from dsq.stash import apply, measure
from tests.dsq.gradients import error, gradient, same, step
from tests.dsq.stash.census import kept_bytes
from tests.models import transformer


def small():
    torch.manual_seed(0)
    return encoder(blocks=3, width=32, heads=4, ffn=64, dropout=0.1)


def test_only_segment_inputs_are_kept():
    model, x = small(), torch.randn(2, 8, 32)
    assert apply(model, "checkpoint").attached == ("0", "1", "2")
    report, random_state = measure(lambda: model(x).sum()), torch.get_rng_state().nbytes
    statistics = 2 * 4 * 2 * 8
    # two blocks' inputs (the first one's is the caller's) and the last norm's
    assert report.nbytes == pytest.approx(3 * x.nbytes + statistics + 3 * random_state, abs=3 * 8)  # and a scale
    assert kept_bytes(lambda: model(x).sum()) == pytest.approx(report.nbytes - 3 * random_state, abs=3 * 8)


def test_batch_norm_counts_once_and_frozen_layers_pass_gradients():
    plain = resnet20((4, 8, 16))
    plain[0].requires_grad_(False)
    model = copy.deepcopy(plain)
    apply(model, "checkpoint", segments=r"\d+")
    x = torch.randn(4, 3, 16, 16)
    assert same(step(model, x), step(plain, x))
    assert same(list(model.buffers()), list(plain.buffers()))


class NestedBlock(nn.Module):
    """Takes and gives more than tensors."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x, scale=1.0, extra=None):
        y = self.lin(x["x"]).tanh() * scale
        return {"x": y, "mask": y > 0, "note": "text", "extra": extra}


class Chain(nn.Module):
    def __init__(self, *blocks):
        super().__init__()
        self.layers = nn.ModuleList(blocks)

    def forward(self, x):
        out = {"x": x}
        for layer in self.layers:
            out = layer({"x": out["x"]}, scale=0.5, extra=out["x"])
        assert out["note"] == "text"
        assert not out["mask"].requires_grad
        return out["x"] + out["extra"]


def test_nested_arguments_and_results():
    plain = Chain(NestedBlock(), NestedBlock())
    model = copy.deepcopy(plain)
    apply(model, "checkpoint")
    x = torch.randn(3, 4)
    assert same(step(model, x), step(plain, x))


def test_with_bfp_inputs_and_recomputed_stash_are_packed():
    model, x = small().eval(), torch.randn(2, 8, 32)
    apply(model, "checkpoint")
    alone, exact = measure(lambda: model(x).sum()), gradient(model, x)
    packed = apply(model, "bfp", bits=4)
    report = measure(lambda: model(x).sum())
    spared, by_norm = (x.nbytes - (x.numel() * (bits + 0.5) / 8 + 1) for bits in (4, 4 + MORE["layernorm"]))
    assert report.nbytes <= alone.nbytes - 2 * spared - by_norm  # two blocks' inputs and what the last norm keeps
    assert packed.report().kept_bytes >= 3 * x.nbytes - 2 * spared - by_norm
    assert 0.01 < error(gradient(model, x), exact) < 0.2


@pytest.mark.parametrize("wanted", [False, True])
def test_a_segment_that_changes_its_input_is_an_error(wanted):
    class Doubling(nn.Linear):
        def forward(self, x):
            x *= 2
            return super().forward(x)

    model = nn.Sequential(nn.Sequential(Doubling(8, 8)))
    apply(model, "checkpoint", segments=r"^0$")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.randn(4, 8, requires_grad=wanted) * 1).sum().backward()


def test_a_cache_that_would_be_filled_twice_is_an_error_not_a_wrong_gradient():
    pytest.importorskip("transformers")
    model, inputs = transformer("gpt2", 16, 2, 2, words=50, batch=(2, 8))
    apply(model, "checkpoint")
    with pytest.raises(RuntimeError, match=r"GPT2Block\) would fill its cache again.* with use_cache=False"):
        model(**inputs, use_cache=True)
    model(**inputs, use_cache=False).loss.backward()


def test_with_mesa_copies_of_buffers_are_buffers():
    plain, x = resnet20((8, 8, 8)), torch.randn(4, 3, 16, 16)
    model = copy.deepcopy(plain)
    apply(model, "checkpoint")
    apply(model, "mesa")
    assert torch.cosine_similarity(gradient(model, x), gradient(plain, x), dim=0) > 0.9
