"""The partition of a graph: what it packs and recomputes, to which gradients and bytes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from analysis.library_models import transformer
from analysis.models import GPT, encoder
from dsq.stash import measure
from dsq.stash.graphs.joint_graph import ATTENTION, MASKS
from tests.dsq.gradients import all_gradients, error
from tests.dsq.stash.graphs.divided import Gated, X, compiled_gradient, divided, packed

TOKENS = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0))


class Loss(nn.Module):
    def __init__(self, tokens=32):
        super().__init__()
        self.gpt = GPT(128, tokens, 64, 2, 4, 0.0)

    def forward(self, tokens):
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1).float(), tokens.flatten())


def convolutions():
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3, padding=1))


def normed_weight():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.GELU())


#: a model, its input, and bytes saved of a compiled step at 6 bits: values in 6.5 bits, masks, what stays exact
VALUES = X.numel()
MODELS = {
    # x^ twice, q, k, v and fc1 of each block, x^ of the last norm; the logits and two sums a token and the mean
    "loss": (Loss, TOKENS, (2 * 9 + 1) * VALUES * 6.5 / 8 + 4 * 128 * 128),
    "fused attention": (lambda: encoder(1, 64, 4, 256, sdpa=True)[:1], X, 9 * VALUES * 6.5 / 8),
    # the weights of attention and its result too
    "written attention": (lambda: encoder(1, 64, 4, 256)[:1], X, (9 + 2 + 1) * VALUES * 6.5 / 8),
    "gated": (Gated, X, 5 * VALUES * 6.5 / 8),
    # the input of the first layer is no activation
    "relu": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), X, VALUES * (6.5 + 1) / 8),
    # the weight that a parametrization makes stays exact
    "normed weight": (normed_weight, X, VALUES * 6.5 / 8),
    "convolutions": (convolutions, X.view(4, 4, 16, 32), 4 * VALUES * (6.5 + 1) / 8),
}


def step(name, partitioner, **options):
    """Return a step's loss, gradient, and the bytes that its graph saves beside weights and the batch."""
    make, x, _ = MODELS[name]
    torch.manual_seed(0)
    model = make()
    compiled = torch.compile(
        model, backend=divided, fullgraph=True, options={"custom_partitioner_fn": partitioner}, **options
    )
    losses = []

    def run():
        y = compiled(x)
        losses.append(y if y.dim() == 0 else y.square().mean())
        return losses[0]

    saved = sum(tensor.nbytes for tensor in measure(run).tensors if tensor.op == "CompiledFunctionBackward")
    losses[0].backward()
    return losses[0].detach(), all_gradients(model), saved


@pytest.mark.parametrize("name", MODELS)
def test_the_partition_alone_changes_no_bit_and_packing_saves_what_is_counted(name):
    loss, exact, unpacked = step(name, None)
    for partitioner in (packed(0), packed(0, 1.0)):
        assert all(map(torch.equal, step(name, partitioner)[:2], (loss, exact)))
    partitioner = packed(6)
    value, gradient, saved = step(name, partitioner)
    assert torch.equal(value, loss)
    assert 0 < error(gradient, exact) < 0.04
    (tensors,) = partitioner.graphs
    counted = sum(tensor.saved_bytes for tensor in tensors)
    assert saved < 0.4 * unpacked
    assert counted <= saved < 1.08 * counted  # and a few numbers a token
    assert counted == MODELS[name][2]
    assert error(step(name, packed(8))[1], exact) < error(gradient, exact) / 2


class Routed(nn.Module):
    """Each token's features times its two largest gates."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(64, 8), nn.Linear(64, 8 * 8)

    def forward(self, x):
        gates, choices = self.router(x).softmax(-1).topk(2, -1)
        outputs = self.experts(x).unflatten(-1, (8, 8)).gather(-2, choices.unsqueeze(-1).expand(*choices.shape, 8))
        return (gates.unsqueeze(-1) * outputs).sum(-2)


def pooled():
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.MaxPool2d(2), nn.Conv2d(16, 4, 3))


@pytest.mark.parametrize(("make", "x", "most"), [(Routed, X, 0.05), (pooled, X.view(4, 4, 16, 32), 0.012)])
def test_experts_and_places_of_maxima_are_those_of_the_forward(make, x, most):
    torch.manual_seed(0)
    model = make()
    assert 0 < error(compiled_gradient(model, packed(4), x), compiled_gradient(model, x=x)) < most


def test_a_mask_that_segments_of_a_checkpoint_share_has_no_codes():
    """It has -inf, which no block holds; its gradient was not a number."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    model, inputs = transformer("llama", 64, 2, 2, words=64, batch=(4, 16))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    gradients = []
    for partitioner in (None, packed(6)):
        torch.compiler.reset()
        run = torch.compile(model, backend=divided, options={"custom_partitioner_fn": partitioner})
        model.zero_grad()
        run(**inputs).loss.backward()
        gradients.append(all_gradients(model))
    assert 0 < error(gradients[1], gradients[0]) < 0.05


def test_a_norm_of_the_graphs_input_saves_exact_deviations():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, 64, generator=generator) * torch.exp(3 * torch.randn(8, 64, 1, generator=generator))
    torch.manual_seed(0)
    model, gradients = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), []
    for partitioner in (None, packed(6)):
        compiled_gradient(model, partitioner, x.requires_grad_())
        gradients.append(x.grad)
    exact, packed_gradient = gradients
    assert 0 < ((packed_gradient - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.1  # of each token


@pytest.mark.parametrize("products", [0.0, 0.5, 1.0])
def test_products_of_normalized_values_are_recomputed_by_share_largest_first(products):
    partitioner = packed(6, products)
    loss, exact, _ = step("fused attention", None)
    value, gradient, _ = step("fused attention", partitioner)
    assert torch.equal(value, loss)
    assert 0 < error(gradient, exact) < 0.04
    saved = sum(tensor.saved_bytes for tensor in partitioner.graphs[0])
    assert saved == {0.0: 9, 0.5: 4, 1.0: 2}[products] * VALUES * 6.5 / 8  # without fc1 and one of q, k and v; x^ alone


def test_a_budget_is_met_by_the_fewest_recomputed_products():
    _, exact, unpacked = step("fused attention", None)
    for products, values in ((0, 9), (1, 5), (4, 2)):  # of fc1, q, k and v; x^ stays
        partitioner = packed(6, budget=1.3 * values * VALUES * 6.5 / 8 / unpacked)
        _, gradient, saved = step("fused attention", partitioner)
        assert saved <= partitioner.memory_budget * unpacked
        assert sum(tensor.saved_bytes for tensor in partitioner.graphs[0]) == values * VALUES * 6.5 / 8
        assert f"{products} of 4 products recomputed" in partitioner.summary()
        assert 0 < error(gradient, exact) < 0.04


@pytest.mark.parametrize("dimensions", [(0,), (1,), (0, 1)], ids=["batch", "length", "both"])
def test_a_dynamic_batch_or_length_changes_no_bit_and_no_byte(dimensions):
    model = encoder(1, 64, 4, 256, sdpa=True)[:1]
    gradients, saved, x = [], [], X.clone()
    for marked in ((), dimensions):
        for dimension in marked:
            torch._dynamo.mark_dynamic(x, dimension)
        partitioner = packed(6)
        gradients.append(compiled_gradient(model, partitioner, x))
        saved.append([tensor.saved_bytes for tensor in partitioner.graphs[0]])
        assert all(tensor.bits for tensor in partitioner.graphs[0])
    assert torch.equal(*gradients)
    assert saved[0] == saved[1]


def test_sizes_may_be_symbolic_and_under_autocast_bfloat16_is_packed():
    torch.manual_seed(0)
    model, partitioner = Loss(64), packed(6)
    plain = copy.deepcopy(model)
    options = {"custom_partitioner_fn": partitioner}
    compiled = torch.compile(model, backend=divided, fullgraph=True, dynamic=True, options=options)
    for length in (32, 48):
        tokens, gradients = torch.randint(0, 128, (4, length)), []
        for run, owner in ((compiled, model), (plain, plain)):
            owner.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                run(tokens).backward()
            gradients.append(all_gradients(owner))
        assert 0 < error(*gradients) < 0.05
    (tensors,) = partitioner.graphs  # one graph served both
    coded = [tensor for tensor in tensors if tensor.bits]
    assert {tensor.dtype for tensor in coded} == {torch.float32, torch.bfloat16}
    assert [tensor.shape for tensor in tensors if not tensor.bits] == [(4 * 32, 128)]  # the logits


def test_peaked_attention_gets_its_sums_from_the_values_that_its_backward_reads(monkeypatch):
    block = encoder(1, 64, 4, 64, sdpa=True)[:1]
    with torch.no_grad():
        for layer in (block[0].attention.q, block[0].attention.k):
            layer.weight *= 8
    errors = []
    for recomputes in (True, False):
        if not recomputes:
            monkeypatch.setattr("dsq.stash.graphs.partitioner._recompute_attention", lambda cut: None)
        errors.append(error(compiled_gradient(block, packed(6)), compiled_gradient(block)))
    assert errors[0] < errors[1] / 2


def test_inductor_compiles_it_with_dropout_whose_mask_is_drawn_again():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))
    partitioners = (None, packed(0), packed(6))
    exact, cut, coded = (compiled_gradient(model, partitioner, backend="inductor") for partitioner in partitioners)
    assert torch.equal(cut, exact)
    assert 0 < error(coded, exact) < 0.05


def test_the_mask_of_every_attention_is_known_by_its_name():
    names = {argument.name for operation in ATTENTION for argument in operation._schema.arguments}
    assert {name for name in names if name.startswith("attn_")} == set(MASKS)
