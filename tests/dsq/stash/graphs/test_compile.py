"""dsq.compile, and torch.compile with dsq.inductor_options."""

import copy
import re

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import dsq
from analysis.models import encoder
from dsq.stash import apply, measure
from tests.dsq.gradients import all_gradients, error, gradient
from tests.dsq.stash.graphs.divided import Gated, X, divided


def blocks():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), *encoder(3, 64, 4, 64, sdpa=True)[:3], nn.Linear(64, 8))


def compiled(model):
    """The controller of a policy on a model that is compiled."""
    controller = apply(model, "bfp", bits=4)
    dsq.compile(model, backend=divided)
    return controller


@pytest.mark.parametrize("stash_alone", [True, False])
def test_equal_blocks_share_a_graph_and_a_rise_compiles_once_more(stash_alone):
    model, plain = blocks(), blocks()
    if stash_alone:
        controller = apply(model, "bfp", bits=4)
    else:
        config = dsq.DSQConfig("[16,4,16,16] [16,8,16,16]", stash="all")
        dsq.convert(model, config)
        controller = model._dsq_stash["bfp"]
    assert dsq.compile(model, backend=divided) is model
    exact = gradient(plain, X)
    first = error(gradient(model, X), exact)
    assert 0 < first < (0.05 if stash_alone else 0.15)
    assert counters["stats"]["unique_graphs"] == 1
    assert {tensor.bits for tensor in controller.partitioner.graphs[0]} <= {0, 6}
    assert "1 graphs save" in str(controller.report())
    if not stash_alone:
        dsq.set_level(model, config, 1)
        assert error(gradient(model, X), exact) < first / 4
        assert counters["stats"]["unique_graphs"] == 2
        return
    controller.remove()
    assert error(gradient(model, X), exact) < 1e-6


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
        gradient(model, X)
    assert counters["stats"]["unique_graphs"] == 1


class Scaling(nn.Module):
    """A block with a matrix of its own beside its layer."""

    def __init__(self):
        super().__init__()
        self.scale, self.linear = nn.Parameter(torch.ones(32, 64)), nn.Linear(64, 64)

    def forward(self, x):
        return self.linear(x * self.scale)


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("make", [blocks, lambda: nn.Sequential(Scaling(), Scaling())])
def test_a_level_that_a_first_forward_decides_compiles_once_and_without_a_warning(make, fullgraph, recwarn):
    """Between graphs dynamo would compile the hook of a block that is converted itself, and warn of its functions."""
    graphs = []
    for level in ("[-,4,-,-]", None):
        torch.compiler.reset()
        counters.clear()
        model = make()
        dynamic = dsq.DynamicPrecision(model, level)
        dsq.compile(model, backend=divided, fullgraph=fullgraph)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                gradient(model, X)
        assert dynamic.metrics()["dsq/simulation"] == 0
        assert not counters["graph_break"]
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1]
    assert not recwarn.list


def test_blocks_of_pytorchs_own_class_are_a_graph_each():
    """A compiler skips their forward, and would trace that of each linear layer alone."""
    model = nn.Sequential(*(nn.TransformerEncoderLayer(64, 4, 128, 0.0, batch_first=True) for _ in range(3)))
    dsq.convert(model, "[-,4,-,-]")
    dsq.compile(model, backend=divided)
    gradient(model, X)
    assert counters["stats"]["unique_graphs"] <= 2  # the first block's input has no gradient
    assert len(model._dsq_stash["bfp"].partitioner.graphs[0]) > 3


def test_a_level_that_quantizes_no_product_leaves_products_to_the_compiler():
    """So that the partitioner packs and recomputes what it would of a model that was not converted."""
    converted, stash_alone = blocks(), blocks()
    dsq.convert(converted, "[-,4,-,-]")
    apply(stash_alone, "bfp", bits=4)
    for model in (converted, stash_alone):
        dsq.compile(model, recomputed_products=1, backend=divided)
    exact = gradient(blocks(), X)
    errors = [error(gradient(model, X), exact) for model in (converted, stash_alone)]
    assert 0 < errors[0] < 1.1 * errors[1]
    graphs = [model._dsq_stash["bfp"].partitioner.graphs[0] for model in (converted, stash_alone)]
    assert [tensor.bits for tensor in graphs[0]] == [tensor.bits for tensor in graphs[1]]


def test_what_the_compiler_gives_back_packs_in_eager_mode():
    model, eager = blocks(), blocks()
    compiled(model)
    apply(eager, "bfp", bits=4)
    with torch.compiler.set_stance("force_eager"):
        assert torch.equal(gradient(model, X), gradient(eager, X))
    assert torch.equal(gradient(copy.deepcopy(model), X), gradient(eager, X))  # a copy is not compiled


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_step_leaves_blocks_to_their_graphs(whole):
    model = nn.Sequential(*blocks()[1:2]) if whole else blocks()
    controller = compiled(model)
    expected = gradient(model, X)
    model.zero_grad()
    step = torch.compile(lambda x: model(x).square().sum(), backend=divided)
    saved = [tensor.nbytes for tensor in measure(lambda: step(X)).tensors if tensor.dtype is not torch.float32]
    step(X).backward()
    assert torch.equal(all_gradients(model), expected)
    assert len(controller.partitioner.graphs) == 1
    assert sum(saved) >= sum(tensor.saved_bytes for tensor in controller.partitioner.graphs[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dsq\.compile\(model\) has compiled the model"):
        torch.compile(lambda x: model(x).sum(), backend=divided, fullgraph=True)(X)


def test_options_that_are_not_passed_on_are_warned_of():
    model = Gated()
    controller = apply(model, "bfp", bits=4)
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
    apply(model, "bfp", bits=4)
    passed = {}
    dsq.compile(model, mode="reduce-overhead", backend=lambda gm, inputs, options: passed.update(options) or gm)
    model(X)
    assert {"triton.cudagraphs", "custom_partitioner_fn"} <= passed.keys()


def test_a_whole_model_is_compiled_by_its_options_or_where_it_has_no_blocks():
    for own_call in (True, False):
        torch.compiler.reset()
        model, plain = Gated(), Gated()
        plain.load_state_dict(model.state_dict())
        controller = apply(model, "bfp", bits=4)
        if own_call:
            run = torch.compile(model, backend=divided, options=dsq.inductor_options(model), fullgraph=True)
        else:
            run = dsq.compile(model, backend=divided)
        assert 0 < error(gradient(model, X, run=run), gradient(plain, X)) < 0.05
        assert len(controller.partitioner.graphs) == 1


def test_activation_checkpointing_beside_it():
    model, plain = blocks(), blocks()
    controller = compiled(model)

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
    compiled(model)
    expected = gradient(model, X)
    for block in model[1:4]:
        fully_shard(block, mesh=init_device_mesh("cpu", (1,)))
    model.zero_grad()
    model(X).square().sum().backward()
    grads = (getattr(p.grad, "to_local", lambda p=p: p.grad)() for p in model.parameters())
    assert torch.equal(torch.cat([grad.flatten() for grad in grads]), expected)
    assert 0 < error(expected, gradient(plain, X)) < 0.05


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
    apply(model, "bfp", bits=4)
    with pytest.raises(ValueError, match=r"recomputed_products must be a number in \[0, 1\], got 2"):
        dsq.inductor_options(model, 2)
    dsq.compile(model, backend=divided)
    with pytest.raises(
        RuntimeError, match=r"^the graph of block '0' breaks: .*; dsq.compile\(model, fullgraph=False\)"
    ):
        model(X)
    dsq.compile(model, backend=divided, fullgraph=False)
    model(X).sum().backward()


class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(64, 64), nn.GELU())

    def forward(self, x):
        rows = x.flatten(0, -2)[: (x > 0).sum().item() % 8]
        return self.inner(x) + self.inner[0](rows).sum()


def test_shapes_that_depend_on_data_are_a_line():
    model = dsq.convert(nn.Sequential(Routed(), Routed()), "mxfp8")
    dsq.compile(model, backend=divided)
    with pytest.raises(RuntimeError, match=r"^the graph of block '0' breaks: a shape .* data, .*fullgraph=False\)"):
        model(X)
    dsq.compile(model, backend=divided, fullgraph=False)
    model(X).sum().backward()


def test_blocks_with_experts_are_graphs_between_the_products_of_experts(monkeypatch):
    of_transformers = pytest.importorskip("tests.dsq.layers.kinds")
    graphs = []
    monkeypatch.setattr(torch, "compile", lambda call, fullgraph, options: graphs.append(fullgraph) or call)
    layers = of_transformers.made("mixtral"), nn.Linear(32, 32)
    blocks = (nn.Sequential(nn.Linear(32, 32), layer) for layer in layers)
    dsq.compile(dsq.convert(nn.Sequential(*blocks), "[8,4,8,8]"))
    assert graphs == [False, True]


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
