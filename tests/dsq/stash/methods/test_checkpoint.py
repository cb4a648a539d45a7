"""Checkpointing: the gradients of the plain model, less kept, and a recomputed stash that the table's policies pack."""

import copy

import pytest
import torch

from analysis.library_models import transformer
from analysis.models import resnet20
from dsq.stash import apply, measure
from dsq.stash_bits import EXTRA_BITS
from tests.dsq.gradients import all_gradients, error, gradient, same, step
from tests.dsq.stash.census import saved_bytes
from tests.dsq.stash.every_policy import small


def test_only_segment_inputs_are_kept():
    model, x = small(0.1), torch.randn(2, 8, 32)
    assert apply(model, "checkpoint").attached == ("0", "1")
    report, random_state = measure(lambda: model(x).sum()), torch.get_rng_state().nbytes
    statistics = 2 * 4 * 2 * 8
    # the second block's input (the first one's is the caller's) and the last norm's
    assert report.nbytes == pytest.approx(2 * x.nbytes + statistics + 2 * random_state, abs=2 * 8)  # and a scale
    assert saved_bytes(lambda: model(x).sum()) == pytest.approx(report.nbytes - 2 * random_state, abs=2 * 8)


def test_batch_norm_counts_once_and_frozen_layers_pass_gradients():
    plain = resnet20((4, 8, 16))
    plain[0].requires_grad_(False)
    model = copy.deepcopy(plain)
    apply(model, "checkpoint", segments=r"\d+")
    x = torch.randn(4, 3, 16, 16)
    assert same(step(model, x), step(plain, x))
    assert same(list(model.buffers()), list(plain.buffers()))
    apply(model, "mesa")  # to which copies of buffers are buffers
    assert torch.cosine_similarity(gradient(model, x), gradient(plain, x), dim=0) > 0.9


def test_with_bfp_inputs_and_recomputed_stash_are_packed():
    model, x = small().eval(), torch.randn(2, 8, 32)
    apply(model, "checkpoint")
    unpacked, exact = measure(lambda: model(x).sum()), gradient(model, x)
    packed = apply(model, "bfp", bits=4)
    report = measure(lambda: model(x).sum())
    spared, by_norm = (x.nbytes - (x.numel() * (bits + 0.5) / 8 + 1) for bits in (4, 4 + EXTRA_BITS["layernorm"]))
    assert report.nbytes <= unpacked.nbytes - spared - by_norm  # a block's input and what the last norm keeps
    assert packed.report().saved_bytes >= 2 * x.nbytes - spared - by_norm
    assert 0.01 < error(gradient(model, x), exact) < 0.2


@pytest.mark.parametrize(("name", "block"), [("gpt2", "GPT2Block"), ("llama", "LlamaDecoderLayer")])
def test_a_cache_that_would_be_filled_twice_is_an_error_not_a_wrong_gradient(name, block):
    """GPT-2 gives its blocks what they take by place, Llama by name."""
    pytest.importorskip("transformers")
    model, inputs = transformer(name, 16, 2, 2, words=50, batch=(2, 8))
    model(**inputs, use_cache=False).loss.backward()
    exact = all_gradients(model)
    apply(model, "checkpoint")
    with pytest.raises(RuntimeError, match=rf"{block}\) would fill its cache again.* with use_cache=False"):
        model(**inputs, use_cache=True)
    model.zero_grad()
    model(**inputs, use_cache=False).loss.backward()
    assert torch.equal(all_gradients(model), exact)
