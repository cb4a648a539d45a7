"""Stash policies of compiled models whose graphs have no partitioner: what is exact, what packs, what is refused."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from analysis.models import encoder
from dsq.stash import apply, measure
from tests.dsq.gradients import error, gradient


class Broken(nn.Module):
    """A block whose graph breaks: attention runs between two graphs."""

    def __init__(self):
        super().__init__()
        self.inner = encoder(1, 32, 4, 64, sdpa=True)[0]

    def forward(self, x):
        return self.inner(x + eager_attention(self.inner.norm1(x).sin()))


@torch.compiler.disable
def eager_attention(x):
    return F.scaled_dot_product_attention(x, x, x)


class ResidualAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=False)[0]


class Stack(nn.Module):
    def __init__(self, blocks, *args):
        super().__init__()
        self.blocks, self.args = nn.ModuleList(blocks), args

    def forward(self, x):
        for block in self.blocks:
            x = block(x, *self.args)
        return x


MODELS = {
    "fused attention": lambda: Stack(encoder(1, 32, 4, 64, sdpa=True)[:1]),
    "torch's attention": lambda: Stack([ResidualAttention()]),
    "two layers": lambda: Stack([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]),
    "graph breaks": lambda: Stack([Broken()]),
}
BROKEN = "random numbers break the graphs, and products run in eager mode: compile with fullgraph=True"
X = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(0))


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def stash_bytes(model):
    return measure(lambda: model(X).square().mean()).nbytes


def seeded_gradient(run):
    torch.manual_seed(0)
    return gradient(run, X)


def compile_blocks(model):
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return model


def compile_each(model):
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")
    return model


ORDERS = {
    "apply, model.compile()": lambda model: (apply(model, "bfp"), model.compile(backend="aot_eager", fullgraph=True)),
    "apply, torch.compile": lambda model: (
        apply(model, "bfp"),
        torch.compile(model, backend="aot_eager", fullgraph=True),
    ),
    "torch.compile, apply": lambda model: (apply(torch.compile(model, backend="aot_eager"), "bfp"), None),
    "blocks, apply": lambda model: (apply(compile_blocks(model), "bfp"), None),
    "apply, torch.compile of blocks": lambda model: (apply(model, "bfp"), compile_each(model)),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["fused attention", "torch's attention"])
def test_a_graph_without_the_partitioner_is_exact_and_one_warning_names_the_call(name, order):
    model = made(name)
    exact = gradient(made(name), X)
    controller, compiled = ORDERS[order](model)
    run = controller.model if compiled is None else compiled
    with pytest.warns(UserWarning, match=r"call dsq\.compile\(model\) in place of torch\.compile"):
        assert error(gradient(run, X), exact) < 1e-6
    torch.compiler.reset()
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert error(gradient(run, X), exact) < 1e-6
    assert "graphs save tensors exact: they were compiled without dsq.compile" in str(controller.report())
    controller.remove()
    assert error(gradient(model, X), exact) < 1e-6


def test_products_with_random_numbers_break_graphs_pack_in_eager_mode_and_are_warned_of_once():
    model = made("two layers")
    dsq.DynamicPrecision(model, "[8,4,8,8]", rounding="stochastic")
    compiled = torch.compile(model, backend="aot_eager")
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert torch.equal(*(seeded_gradient(run) for run in (compiled, model)))
    assert [str(w.message) for w in warned if "graphs" in str(w.message)] == [BROKEN]
    assert "save tensors exact" not in str(dsq.report(model, X))


def test_a_backend_that_takes_no_partitioner_is_exact_and_the_report_says_so():
    model = made("fused attention")
    controller = apply(model, "bfp")
    dsq.compile(model, backend="aot_eager")
    assert error(gradient(model, X), gradient(made("fused attention"), X)) < 1e-6
    assert "or the backend saves tensors exact" in str(dsq.report(model, X))
    assert "no graph was cut here" in str(controller.report())


def test_between_the_graphs_of_a_block_tensors_are_packed():
    model, exact = made("graph breaks"), made("graph breaks")
    apply(compile_blocks(model), "bfp")
    with pytest.warns(UserWarning, match="dsq.compile"):
        assert stash_bytes(model) < stash_bytes(exact)
    assert 0 < error(gradient(model, X), gradient(exact, X)) < 0.05
    assert torch.equal(gradient(copy.deepcopy(model), X), gradient(packed_in_eager_mode("graph breaks"), X))


def packed_in_eager_mode(name):
    model = made(name)
    apply(model, "bfp")
    return model


@pytest.mark.parametrize(
    "policy, order", [("gact", "apply, block.compile"), ("mesa", "apply, compile"), ("gact", "apply, compile")]
)
def test_a_graph_around_or_inside_of_a_policy_is_refused(policy, order):
    model = made("fused attention")
    run = torch.compile(model, backend="eager") if order == "apply, compile" else model
    apply(model, policy)
    if order.endswith("block.compile"):
        model.blocks[0].compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"does not work inside torch\.compile"):
        run(X).sum().backward()


@pytest.mark.parametrize("order", ["apply, compile", "compile, apply", "blocks"])
@pytest.mark.parametrize("cause", ["recompile_limit", "eager_on_recompile", "disable"])
def test_what_the_compiler_leaves_to_eager_mode_is_packed_there(cause, order):
    model, eager = made("two layers"), made("two layers")
    apply(eager, "bfp")
    if order == "apply, compile":
        apply(model, "bfp")
    compiled = model if order == "blocks" else torch.compile(model, backend="eager", dynamic=False)
    if order == "blocks":
        model.blocks[0].compile(backend="eager", dynamic=False)
    if order != "apply, compile":
        apply(compiled, "bfp")
    config = {"recompile_limit": 1} if cause == "recompile_limit" else {"disable": cause == "disable"}
    with torch._dynamo.config.patch(config):
        if cause != "disable":  # one graph
            compiled(X).sum().backward()
        stance = "eager_on_recompile" if cause == "eager_on_recompile" else "default"
        with torch.compiler.set_stance(stance):
            for count in (3, 2):
                expected, gradients = (gradient(run, X[:count]) for run in (eager, compiled))
                assert torch.equal(gradients, expected)


def test_compiled_models_that_a_policy_cannot_reach_and_blocks_for_which_it_needs_an_eager_model_are_refused():
    compiled, model = made("fused attention"), made("fused attention")
    compiled.compile()
    with pytest.raises(ValueError, match=r"does not work inside torch\.compile: use an eager model"):
        apply(compiled, "bfp")
    compile_blocks(model)
    for policy in ("wtacrs", "gact", "mesa"):
        with pytest.raises(ValueError, match=f"'{policy}' needs an eager model.* go bfp"):
            apply(model, policy)
