"""Compiled graphs that pack what they save: the codec's bits, the partition, and dsq.compile.

Graphs are divided into forward and backward as Inductor does, passes and all, but run operation by operation, without
its C++ compiler, in all tests but one.
"""

import copy
import re

import pytest
import torch
import torch._inductor.compile_fx
from torch import distributed, nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.compilers import nop
from torch._guards import detect_fake_mode
from torch._inductor import config
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dsq
from analysis.models import GPT, encoder
from dsq.formats import BFP
from dsq.kernels.dispatch import layout_of
from dsq.kernels.reference.backend import REFERENCE
from dsq.stash import measure
from dsq.stash.graphs import codec
from dsq.stash.graphs.codec import RowLayout
from dsq.stash.graphs.partitioner import PackedPartitioner
from tests.dsq.gradients import all_gradients, error

TOKENS = torch.randint(0, 128, (4, 32), generator=torch.Generator().manual_seed(0))
X = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()


def _partition(gm, inputs, **kwargs):
    with V.set_fake_mode(detect_fake_mode(inputs)):
        return torch._inductor.compile_fx.partition_fn(gm, inputs, **kwargs)


_DIVIDED = aot_autograd(fw_compiler=nop, partition_fn=_partition, decompositions=select_decomp_table())


def divided(gm, inputs, options=None):
    with config.patch(options or {}):
        return _DIVIDED(gm, inputs)


def packed(bits, products=0.0, budget=None):
    return PackedPartitioner(lambda: bits, products, budget)


# ---- the codec


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("fused", [True, False], ids=["plain operations", "operators"])
def test_codes_stand_for_the_references_values(bits, dtype, fused):
    generator = torch.Generator().manual_seed(bits)
    x = torch.randn(64, 48, generator=generator) * torch.exp(3 * torch.randn(64, 1, generator=generator))
    x[0], x[1, 3], x[2, 5], x[3, 40] = 0, float("inf"), float("nan"), -float("inf")
    x = x.to(dtype).view(4, 16, 48).transpose(0, 1)
    layout = RowLayout.of(x, 16)
    saved = codec.encode(x, bits, layout, fused)
    decoded = codec.decode(*saved, bits=bits, layout=layout, dtype=dtype, fused=fused)
    flat = x.transpose(0, 1).flatten()
    rows, fmt = layout_of(flat.shape, 0), BFP(bits, 16)
    expected = REFERENCE.unpack(*REFERENCE.pack(flat, fmt, rows, None), fmt, rows, dtype)
    assert torch.equal(decoded.transpose(0, 1).flatten().nan_to_num(7.0), expected.flatten().nan_to_num(7.0))
    assert decoded.stride() == x.stride()
    assert sum(part.nbytes for part in saved) * 8 == x.numel() * (bits + 0.5)


@pytest.mark.parametrize("fused", [True, False])
def test_a_mask_is_a_bit_a_value(fused):
    mask = X > 0.3
    layout = RowLayout.of(mask, 8)
    (words,) = codec.encode_mask(mask, layout, fused)
    assert words.nbytes == mask.numel() / 8
    assert torch.equal(codec.decode_mask(words, layout=layout, fused=fused), mask)


@pytest.mark.parametrize(
    ("x", "columns"),
    [
        (X, (64,)),
        (X.transpose(0, 2), (64,)),
        (torch.zeros(5, 4, 4), (4, 4)),
        (X[..., :32], None),
        (X[:, :1, 1:5], None),
    ],
)
def test_rows_are_neighbors_in_memory(x, columns):
    layout = RowLayout.of(x, 16)
    assert (layout and layout.columns) == columns


# ---- the partition


class Loss(nn.Module):
    def __init__(self, tokens=32):
        super().__init__()
        self.gpt = GPT(128, tokens, 64, 2, 4, 0.0)

    def forward(self, tokens):
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1).float(), tokens.flatten())


class Gated(nn.Module):
    """An RMS norm that is written out, and a gated product."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(64))
        self.gate, self.up, self.down = nn.Linear(64, 128), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x):
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


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
        gates, chosen = self.router(x).softmax(-1).topk(2, -1)
        outputs = self.experts(x).unflatten(-1, (8, 8)).gather(-2, chosen.unsqueeze(-1).expand(*chosen.shape, 8))
        return (gates.unsqueeze(-1) * outputs).sum(-2)


def pooled():
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.MaxPool2d(2), nn.Conv2d(16, 4, 3))


@pytest.mark.parametrize(("make", "x", "most"), [(Routed, X, 0.05), (pooled, X.view(4, 4, 16, 32), 0.012)])
def test_experts_and_places_of_maxima_are_those_of_the_forward(make, x, most):
    torch.manual_seed(0)
    gradients, partitioner, model = [], packed(4), make()
    for options in ({}, {"custom_partitioner_fn": partitioner}):
        torch.compiler.reset()
        model.zero_grad()
        torch.compile(model, backend=divided, fullgraph=True, options=options)(x).square().mean().backward()
        gradients.append(all_gradients(model))
    assert 0 < error(*reversed(gradients)) < most


def test_a_norm_of_the_graphs_input_saves_exact_deviations():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 64, 64, generator=generator) * torch.exp(3 * torch.randn(8, 64, 1, generator=generator))
    torch.manual_seed(0)
    model, gradients = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64)), []
    for options in ({}, {"custom_partitioner_fn": packed(6)}):
        torch.compiler.reset()
        x.grad = None
        torch.compile(model, backend=divided, fullgraph=True, options=options)(
            x.requires_grad_()
        ).square().sum().backward()
        gradients.append(x.grad)
    exact, ours = gradients
    assert 0 < ((ours - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 0.1  # of each token


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


def test_a_budget_that_cannot_be_met_is_a_line_and_a_rise_of_the_level_goes_on_with_a_warning():
    config, model = dsq.DSQConfig("[-,4,-,-] [-,16,-,-]"), blocks()
    dsq.convert(model, config)
    with pytest.raises(ValueError, match="recomputed_products must be absent beside memory_budget"):
        dsq.compile(model, 0.5, 0.5)
    dsq.compile(model, memory_budget=0.01, backend=divided)
    line = r"^memory_budget must be at least (0\.\d+) for this graph, of 6 bits, got 0\.01$"
    with pytest.raises(ValueError, match=line) as info:
        model(X)
    dsq.compile(model, memory_budget=float(re.match(line, str(info.value))[1]), backend=divided)
    model(X)
    dsq.set_level(model, config, 1)
    with pytest.warns(UserWarning, match="memory_budget is exceeded: it has to be at least .* of all bits"):
        model(X)


@pytest.mark.parametrize("dimensions", [(0,), (1,), (0, 1)], ids=["batch", "length", "both"])
def test_a_dynamic_batch_or_length_changes_no_bit_and_no_byte(dimensions):
    model = encoder(1, 64, 4, 256, sdpa=True)[:1]
    gradients, saved, x = [], [], X.clone()
    for marked in ((), dimensions):
        torch.compiler.reset()
        for dimension in marked:
            torch._dynamo.mark_dynamic(x, dimension)
        partitioner = packed(6)
        run = torch.compile(model, backend=divided, fullgraph=True, options={"custom_partitioner_fn": partitioner})
        model.zero_grad()
        run(x).square().mean().backward()
        gradients.append(all_gradients(model))
        saved.append(partitioner.graphs)
    assert torch.equal(*gradients)
    assert [[tensor.saved_bytes for tensor in graph] for graph in saved[0]] == [
        [tensor.saved_bytes for tensor in graph] for graph in saved[1]
    ]
    assert all(tensor.bits for tensor in saved[1][0])


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
        gradients = []
        for partitioner in (None, packed(6)):
            torch.compiler.reset()
            block.zero_grad()
            run = torch.compile(block, backend=divided, options={"custom_partitioner_fn": partitioner})
            run(X).square().mean().backward()
            gradients.append(all_gradients(block))
        errors.append(error(*reversed(gradients)))
    assert errors[0] < errors[1] / 2


# ---- dsq.compile


@pytest.fixture
def one_process():
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), *encoder(3, 64, 4, 64, sdpa=True)[:3], nn.Linear(64, 8))


def gradient(model, x=X):
    model.zero_grad()
    model(x).square().mean().backward()
    return all_gradients(model)


@pytest.mark.parametrize("stash_alone", [True, False])
def test_equal_blocks_share_a_graph_and_a_rise_compiles_once_more(stash_alone):
    model, plain = blocks(), blocks()
    if stash_alone:
        controller = dsq.stash.apply(model, "bfp", bits=4)
    else:
        config = dsq.DSQConfig("[16,4,16,16] [16,8,16,16]", stash="all")
        dsq.convert(model, config)
        controller = model._dsq_stash["bfp"]
    assert dsq.compile(model, backend=divided) is model
    exact = gradient(plain)
    first = error(gradient(model), exact)
    assert 0 < first < (0.05 if stash_alone else 0.15)
    assert counters["stats"]["unique_graphs"] == 1
    assert {tensor.bits for tensor in controller.partitioner.graphs[0]} <= {0, 6}
    assert "1 graphs save" in str(controller.report())
    if not stash_alone:
        dsq.set_level(model, config, 1)
        assert error(gradient(model), exact) < first / 4
        assert counters["stats"]["unique_graphs"] == 2
        return
    controller.remove()
    assert error(gradient(model), exact) < 1e-6


class Positioned(nn.Module):
    """Blocks of a model that has a matrix of its own, by which its forward might multiply."""

    def __init__(self):
        super().__init__()
        self.positions, self.blocks = nn.Parameter(torch.zeros(32, 64)), blocks()

    def forward(self, x):
        return self.blocks(x + self.positions)


def test_blocks_are_compiled_once_in_a_model_with_a_matrix_of_its_own():
    model = dsq.convert(Positioned(), "[-,4,-,-]")
    dsq.compile(model, backend=divided)
    for _ in range(2):
        gradient(model)
    assert counters["stats"]["unique_graphs"] == 1


def test_blocks_of_pytorchs_own_class_are_a_graph_each():
    """A compiler skips their forward, and would trace that of each linear layer alone."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(3)))
    dsq.convert(model, "[-,4,-,-]")
    dsq.compile(model, backend=divided)
    gradient(model)
    assert counters["stats"]["unique_graphs"] <= 2  # the first block's input has no gradient
    assert len(model._dsq_stash["bfp"].partitioner.graphs[0]) > 3


def test_a_level_that_quantizes_no_product_leaves_products_to_the_compiler():
    """So that the partitioner packs and recomputes what it would of a model that was not converted."""
    converted, stash_alone = blocks(), blocks()
    dsq.convert(converted, "[-,4,-,-]")
    dsq.stash.apply(stash_alone, "bfp", bits=4)
    for model in (converted, stash_alone):
        dsq.compile(model, recomputed_products=1, backend=divided)
    exact = gradient(blocks())
    errors = [error(gradient(model), exact) for model in (converted, stash_alone)]
    assert 0 < errors[0] < 1.1 * errors[1]
    graphs = [model._dsq_stash["bfp"].partitioner.graphs[0] for model in (converted, stash_alone)]
    assert [tensor.bits for tensor in graphs[0]] == [tensor.bits for tensor in graphs[1]]


def test_what_the_compiler_gives_back_packs_in_eager_mode():
    compiled, eager = blocks(), blocks()
    for model in (compiled, eager):
        dsq.stash.apply(model, "bfp", bits=4)
    dsq.compile(compiled, backend=divided)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(gradient(compiled), gradient(eager))
    assert torch.equal(gradient(copy.deepcopy(compiled)), gradient(eager))  # a copy is not compiled


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step_leaves_blocks_to_their_graphs(whole):
    model = nn.Sequential(*blocks()[1:2]) if whole else blocks()
    x = X
    controller = dsq.stash.apply(model, "bfp", bits=4)
    dsq.compile(model, backend=divided)
    expected = gradient(model)
    model.zero_grad()
    step = torch.compile(lambda x: model(x).square().mean(), backend=divided)
    saved = [tensor.nbytes for tensor in measure(lambda: step(x)).tensors if tensor.dtype is not torch.float32]
    step(x).backward()
    assert torch.equal(all_gradients(model), expected)
    assert len(controller.partitioner.graphs) == 1
    assert sum(saved) >= sum(tensor.saved_bytes for tensor in controller.partitioner.graphs[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dsq\.compile\(model\) has compiled the model"):
        torch.compile(lambda x: model(x).sum(), backend=divided, fullgraph=True)(x)


def test_options_that_are_not_passed_on_are_warned_of():
    model = Gated()
    controller = dsq.stash.apply(model, "bfp", bits=4)
    dsq.inductor_options(model)
    with pytest.warns(UserWarning, match=r"torch\.compile\(model, options=dsq\.inductor_options\(model\)\)"):
        torch.compile(model, backend=divided, fullgraph=True)(X)
    assert "other graphs save tensors exact: they were compiled without dsq.compile" in str(controller.report())


def test_graphs_of_a_copy_have_the_bits_of_its_own_level_and_wrappers_those_of_the_model_inside():
    config, model = dsq.DSQConfig("[16,4,16,16] [16,6,16,16]"), blocks()
    dsq.convert(model, config)
    average = copy.deepcopy(model)
    dsq.set_level(average, config, 1)
    for net in (model, average, nn.Sequential(average), average[1]):
        partitioner = dsq.inductor_options(net)["custom_partitioner_fn"]
        assert partitioner.bits() == (6 if net is model else 8)
        assert dsq.inductor_options(net)["custom_partitioner_fn"] is partitioner


def test_modes_of_torch_compile_come_with_the_options():
    model = blocks()
    dsq.stash.apply(model, "bfp", bits=4)
    options = {}
    dsq.compile(model, mode="reduce-overhead", backend=lambda gm, inputs, options: options_of(gm, options))

    def options_of(gm, given):
        options.update(given)
        return gm

    model(X)
    assert {"triton.cudagraphs", "custom_partitioner_fn"} <= options.keys()


def test_a_whole_model_is_compiled_by_its_options_or_where_it_has_no_blocks():
    for own_call in (True, False):
        torch.compiler.reset()
        model, plain = Gated(), Gated()
        plain.load_state_dict(model.state_dict())
        controller = dsq.stash.apply(model, "bfp", bits=4)
        if own_call:
            run = torch.compile(model, backend=divided, options=dsq.inductor_options(model), fullgraph=True)
        else:
            run = dsq.compile(model, backend=divided)
        run(X).square().mean().backward()
        exact = gradient(plain)
        assert 0 < error(all_gradients(model), exact) < 0.05
        assert len(controller.partitioner.graphs) == 1


def test_activation_checkpointing_beside_it():
    model, plain = blocks(), blocks()
    controller = dsq.stash.apply(model, "bfp", bits=4)
    dsq.compile(model, backend=divided)

    def run(net):
        x = net[0](X)
        for block in net[1:4]:
            x = checkpoint(block, x, use_reentrant=False)
        net[4](x).square().mean().backward()
        return all_gradients(net)

    assert 0 < error(run(model), run(plain)) < 0.05
    assert len(controller.partitioner.graphs) == 1


def test_weights_that_fully_shard_gathers_stay_exact(one_process):
    model, plain = blocks(), blocks()
    dsq.stash.apply(model, "bfp", bits=4)
    dsq.compile(model, backend=divided)
    expected = gradient(model)
    for block in model[1:4]:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    model.zero_grad()
    model(X).square().mean().backward()
    grads = (getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters())
    assert torch.equal(torch.cat([grad.flatten() for grad in grads]), expected)
    assert 0 < error(expected, gradient(plain)) < 0.05


class Broken(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def forward(self, x):
        x = self.inner(x)
        torch._dynamo.graph_break()
        return self.inner(x)


def test_a_graph_break_in_a_block_and_models_without_a_policy_are_a_line():
    model = nn.Sequential(Broken(), Broken())
    with pytest.raises(ValueError, match=r"model must be under a stash policy .* call dsq\.DynamicPrecision"):
        dsq.compile(model)
    dsq.stash.apply(model, "bfp", bits=4)
    with pytest.raises(ValueError, match=r"recomputed_products must be a number in \[0, 1\], got 2"):
        dsq.inductor_options(model, 2)
    dsq.compile(model, backend=divided)
    with pytest.raises(
        RuntimeError, match=r"^the graph of block '0' breaks: .*; dsq.compile\(model, fullgraph=False\)"
    ):
        model(X)
    dsq.compile(model, backend=divided, fullgraph=False)
    model(X).sum().backward()


def test_inductor_compiles_it_with_dropout_whose_mask_is_drawn_again():
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64))
    gradients = []
    for partitioner in (None, packed(0), packed(6)):
        torch.compiler.reset()
        torch.manual_seed(1)
        run = torch.compile(model, fullgraph=True, options={"custom_partitioner_fn": partitioner})
        model.zero_grad()
        run(X).square().mean().backward()
        gradients.append(all_gradients(model))
    assert torch.equal(gradients[1], gradients[0])
    assert 0 < error(gradients[2], gradients[0]) < 0.05
