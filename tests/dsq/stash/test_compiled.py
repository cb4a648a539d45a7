"""Stash policies of compiled models, and of models whose blocks were compiled one by one; orders that are refused."""

import copy
import weakref

import pytest
import torch
import torch._inductor.compile_fx
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.compilers import nop
from torch._inductor.decomposition import select_decomp_table
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import dsq
from analysis.models import encoder
from dsq.stash import apply, measure
from dsq.stash.policy import run_eagerly
from tests.dsq.gradients import all_gradients, error


class Rotated(nn.Module):
    """A block with parts that no policy may touch: a table of rotations, a float mask, an RMS norm, dropout, a ReLU."""

    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads, self.scale = heads, nn.Parameter(torch.ones(width))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("frequencies", 0.3 ** torch.arange(width // heads // 2))

    def forward(self, x, mask):
        h = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale
        angles = torch.arange(x.shape[1])[:, None] * self.frequencies
        q, k, v = self.qkv(h).view(*x.shape[:2], 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (torch.cat((t * angles.cos().repeat(1, 2), t * angles.sin().repeat(1, 2)), -1) for t in (q, k))
        y = F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
        return x + F.relu(self.out(y))


class Broken(nn.Module):
    """A block whose graph breaks: attention runs between two graphs."""

    def __init__(self):
        super().__init__()
        self.inner = encoder(1, 32, 4, 64, sdpa=True)[0]

    def forward(self, x):
        q = self.inner.norm1(x).sin()
        torch._dynamo.graph_break()
        y = F.scaled_dot_product_attention(q, q, q)
        torch._dynamo.graph_break()
        return self.inner(x + y)


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
    "two blocks": lambda: Stack(encoder(2, 32, 4, 64, sdpa=True)[:2]),
    "written attention": lambda: Stack(encoder(1, 32, 4, 64)[:1]),
    "converted": lambda: Stack(dsq.convert(encoder(1, 32, 4, 64, sdpa=True)[:1], stash="linears")),
    "two layers": lambda: Stack([nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))]),
    "rotations": lambda: Stack([Rotated()], torch.zeros(24, 24).triu(1) * -4.0),
    "graph breaks": lambda: Stack([Broken()]),
}
#: chooses what to save as inductor does, without its compiler
PARTITIONED = "aot_eager_decomp_partition"
#: divides into forward and backward as inductor does, passes and all, without its compiler
DIVIDED = aot_autograd(
    fw_compiler=nop, partition_fn=torch._inductor.compile_fx.partition_fn, decompositions=select_decomp_table
)
X = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()
    counters.clear()


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def compile_blocks(model, how="block.compile()"):
    for index, block in enumerate(model.blocks):
        if how == "block.compile()":
            block.compile(backend=PARTITIONED)
        else:
            model.blocks[index] = torch.compile(block, backend=PARTITIONED)


def loss(model, x=X):
    return model(x).square().mean()


def gradient(model, x=X):
    model.zero_grad()
    loss(model, x).backward()
    return all_gradients(model)


def stash_bytes(model):
    return measure(lambda: loss(model)).nbytes


CASES = [("graph breaks", "block.compile()", "bfp"), ("fused attention", "torch.compile(block)", "mesa")]


def check_against_eager_mode(name, compiled, policy):
    """Bytes and gradients under the policy; returns its controller, the exact gradient and that of eager mode."""
    plain, eager = made(name), made(name)
    exact = gradient(plain)
    assert error(gradient(compiled), exact) < 1e-6
    saved = max(1, stash_bytes(compiled) / stash_bytes(plain))  # of written attention the compiler saves more
    apply(eager, policy)
    controller = apply(compiled, policy)
    packed = gradient(eager)
    # a graph makes nothing again of other codes: a linear layer keeps 4 bits of what GELU gave, which eager mode makes
    # again of 6
    assert 0 < error(gradient(compiled), exact) <= 3.5 * error(packed, exact)
    assert stash_bytes(compiled) <= 1.55 * saved * stash_bytes(eager)
    return controller, exact, packed


@pytest.mark.parametrize(("name", "how", "policy"), CASES)
def test_a_policy_keeps_the_bytes_and_gives_the_gradients_of_eager_mode(name, how, policy):
    model = made(name)
    compile_blocks(model, how)
    calls = [block._compiled_call_impl for block in model.blocks]
    controller, exact, packed = check_against_eager_mode(name, model, policy)
    if how == "block.compile()":
        assert torch.equal(gradient(copy.deepcopy(model)), packed)  # a copy runs eager blocks
    controller.remove()
    assert [block._compiled_call_impl for block in model.blocks] == calls
    assert error(gradient(model), exact) < 1e-6


class Unpacked(TorchDispatchMode):
    """Counts the tensors that were unpacked and are alive."""

    def __init__(self):
        super().__init__()
        self.alive, self.all, self.most = weakref.WeakSet(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.dsq.unpack.default, torch.ops.dsq.unpack_in_range.default):
            self.alive.add(result)
            self.all, self.most = self.all + 1, max(self.most, len(self.alive))
        return result


WHOLE = [("rotations", False, "bfp"), ("converted", False, "bfp"), ("written attention", False, "mesa")]
WHOLE += [("two layers", True, "bfp")]


@pytest.mark.parametrize(("name", "dynamic", "policy"), WHOLE)
def test_one_graph_of_a_whole_model_does_too_and_unpacks_a_tensor_when_it_is_used(name, dynamic, policy):
    compiled = torch.compile(made(name), backend=DIVIDED, fullgraph=True, dynamic=dynamic)
    controller, exact, _ = check_against_eager_mode(name, compiled, policy)
    value = loss(compiled)
    with Unpacked() as unpacked:
        value.backward()
    assert unpacked.most < unpacked.all
    assert unpacked.most <= 3  # what attention was given and gave, and its neighbors
    controller.remove()
    assert error(gradient(compiled), exact) < 1e-6


def test_ranges_go_on_in_one_graph_and_in_graphs_of_one_class():
    whole, blocks = made("fused attention"), made("two blocks")
    for block in blocks.blocks:
        block.compile(backend=DIVIDED)
    for model, count in ((torch.compile(whole, backend=DIVIDED, fullgraph=True), 1), (blocks, 2)):
        controller = apply(model, "mesa", decay=0.5)
        loss(model).backward()
        first = controller.state_dict()["ranges"]
        whole.blocks[0].norm1.weight.data *= 3
        blocks.blocks[0].norm1.weight.data *= 3
        loss(model).backward()
        then = controller.state_dict()["ranges"]
        assert then.keys() == first.keys()
        assert len(first) >= 8 * count
        grown = [then[key][0] / first[key][0] for key in first]
        assert any(torch.allclose(each, torch.tensor(2.0)) for each in grown)  # the mean of 1 and 3
    with run_eagerly():
        exact = gradient(blocks.blocks[1])
    assert error(gradient(blocks.blocks[1]), exact) < 0.02  # no forward of the model runs: in ranges of its own
    assert controller.state_dict()["ranges"].keys() == first.keys()


def test_under_autocast_weights_stay_exact():
    plain, eager, compiled = (made("fused attention") for _ in range(3))
    compile_blocks(compiled)
    for model in (eager, compiled):
        apply(model, "bfp")
    with torch.autocast("cpu", torch.bfloat16):
        exact, expected, found = (gradient(model) for model in (plain, eager, compiled))
    assert 0 < error(found, exact) <= 3.5 * error(expected, exact)


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


@pytest.mark.parametrize("of", [lambda model: model.blocks[0], lambda model: model], ids=["block", "model"])
def test_a_graph_compiled_after_the_policy_came_is_packed_too(of):
    model, eager = made("fused attention"), made("fused attention")
    apply(model, "bfp")
    apply(eager, "bfp")
    of(model).compile(backend="aot_eager")
    assert error(gradient(model), gradient(eager)) < 0.05


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
                expected, gradients = (gradient(each, X[:count]) for each in (eager, compiled))
                assert torch.equal(gradients, expected)


class Dropped(nn.Module):
    """Attention with dropout, grouped queries and a mask that wants a gradient."""

    def __init__(self):
        super().__init__()
        self.mask, self.qkv = nn.Parameter(torch.zeros(24, 24)), nn.Linear(32, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(4, 24, 8, 8).transpose(1, 2).split([4, 2, 2], 1)
        return F.scaled_dot_product_attention(q, k, v, self.mask, 0.3, enable_gqa=True)


def test_attention_draws_in_a_graph_as_it_does_outside_of_one():
    found, eager = [], Dropped()
    for model in (eager, torch.compile(copy.deepcopy(eager), backend=DIVIDED, fullgraph=True)):
        apply(model, "bfp", bits=8)
        torch.manual_seed(0)
        found.append(gradient(model))
    assert error(*found) < 1e-3  # blocks lie otherwise where q, k and v are views


def test_compiled_models_that_a_policy_cannot_reach_and_blocks_for_which_it_needs_an_eager_model_are_refused():
    compiled, model = made("fused attention"), made("fused attention")
    compiled.compile()
    with pytest.raises(ValueError, match=r"compile first, then stash.apply\(compiled, ...\) to compiled"):
        apply(compiled, "bfp")
    compile_blocks(model)
    for policy in ("wtacrs", "gact"):
        with pytest.raises(ValueError, match=f"'{policy}' needs an eager model.* go bfp, mesa"):
            apply(model, policy)
