"""Models whose blocks torch.compile compiled one by one, under stash policies; what else is compiled is refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from analysis.models import encoder
from dsq.stash import apply, measure
from tests.dsq.stash.gradients import all_gradients, error


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
    "fused attention": lambda: Stack(encoder(2, 32, 4, 64, sdpa=True)[:2]),
    "written attention": lambda: Stack(encoder(2, 32, 4, 64)[:2]),
    "converted": lambda: Stack(dsq.convert(encoder(2, 32, 4, 64, sdpa=True)[:2])),
    "rotations": lambda: Stack([Rotated(), Rotated()], torch.zeros(24, 24).triu(1) * -4.0),
    "graph breaks": lambda: Stack([Broken(), Broken()]),
}
#: chooses what to save as inductor does, without its compiler
PARTITIONED = "aot_eager_decomp_partition"
X = torch.randn(4, 24, 32, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _fresh():
    torch.compiler.reset()


def made(name):
    torch.manual_seed(0)
    return MODELS[name]()


def compile_blocks(model, how="block.compile()"):
    for index, block in enumerate(model.blocks):
        if how != "torch.compile(block)":
            block.compile(backend=PARTITIONED, dynamic=how == "dynamic sizes")
        else:
            model.blocks[index] = torch.compile(block, backend=PARTITIONED)


def loss(model):
    return model(X).square().mean()


def gradient(model):
    model.zero_grad()
    loss(model).backward()
    return all_gradients(model)


def stash_bytes(model):
    return measure(lambda: loss(model)).nbytes


CASES = [(name, "block.compile()", "bfp") for name in MODELS]
CASES += [("fused attention", how, "bfp") for how in ("torch.compile(block)", "dynamic sizes")]
CASES += [(name, "block.compile()", "mesa") for name in ("fused attention", "written attention", "graph breaks")]


@pytest.mark.parametrize(("name", "how", "policy"), CASES)
def test_a_policy_keeps_the_bytes_and_gives_the_gradients_of_eager_mode(name, how, policy):
    plain, eager, compiled = (made(name) for _ in range(3))
    compile_blocks(compiled, how)
    exact = gradient(plain)
    assert error(gradient(compiled), exact) < 1e-6
    saved = max(1, stash_bytes(compiled) / stash_bytes(plain))  # of written attention the compiler saves more
    for model in (eager, compiled):
        apply(model, policy)
    of_eager = error(gradient(eager), exact)
    assert error(gradient(compiled), exact) == pytest.approx(of_eager, rel=0.2)  # other tensors are saved
    assert stash_bytes(compiled) <= 1.05 * saved * stash_bytes(eager)


def test_a_block_that_was_trained_by_itself_first():
    plain, compiled = made("fused attention"), made("fused attention")
    compile_blocks(compiled)
    apply(compiled, "bfp")
    compiled.blocks[0](X).sum().backward()  # its graph is made here, under no hooks
    assert error(gradient(compiled), gradient(plain)) < 0.15


def test_under_autocast_weights_stay_exact():
    plain, eager, compiled = (made("fused attention") for _ in range(3))
    compile_blocks(compiled)
    for model in (eager, compiled):
        apply(model, "bfp")
    with torch.autocast("cpu", torch.bfloat16):
        exact, expected, found = (gradient(model) for model in (plain, eager, compiled))
    assert error(found, exact) == pytest.approx(error(expected, exact), rel=0.2)


def test_gact_measures_its_bits_over_compiled_blocks():
    plain, eager, compiled = (made("fused attention") for _ in range(3))
    compile_blocks(compiled)
    controllers = [apply(model, "gact", adapt_interval=100) for model in (eager, compiled)]
    for _ in range(2):
        found, expected = gradient(compiled), gradient(eager)
    assert all("c = " in controller.report().details[1] for controller in controllers)
    assert error(found, gradient(plain)) == pytest.approx(error(expected, gradient(plain)), rel=0.3)


def test_remove_gives_the_compiled_blocks_back():
    model = made("fused attention")
    compile_blocks(model)
    calls, exact = [block._compiled_call_impl for block in model.blocks], gradient(model)
    controller = apply(model, "bfp")
    assert error(gradient(model), exact) > 1e-3
    controller.remove()
    assert [block._compiled_call_impl for block in model.blocks] == calls
    assert error(gradient(model), exact) < 1e-6


def test_a_copy_runs_eager_blocks_and_is_packed_too():
    model, eager = made("fused attention"), made("fused attention")
    compile_blocks(model)
    apply(model, "bfp")
    apply(eager, "bfp")
    twin = copy.deepcopy(model)
    assert torch.equal(gradient(twin), gradient(eager))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("order", ["apply, compile", "apply, module.compile", "apply, block.compile", "run, apply"])
def test_a_compiled_model_and_blocks_compiled_later_are_refused(order, backend):
    model = made("fused attention")
    run = torch.compile(model, backend=backend) if order in ("apply, compile", "run, apply") else model
    if order == "run, apply":
        run(X)
    apply(model, "bfp")
    if order.endswith("module.compile"):
        model.compile(backend=backend)
    elif order.endswith("block.compile"):
        model.blocks[0].compile(backend=backend)
    with pytest.raises(RuntimeError, match=r"does not work inside torch\.compile"):
        run(X).sum().backward()


def test_policies_on_a_compiled_model_are_refused():
    compiled = made("fused attention")
    compiled.compile()
    for model in (torch.compile(made("fused attention")), compiled):
        with pytest.raises(ValueError, match=r"does not work inside torch\.compile"):
            apply(model, "bfp")


def test_policies_that_need_an_eager_model_refuse_compiled_blocks():
    model = made("fused attention")
    compile_blocks(model)
    with pytest.raises(ValueError, match=r"'wtacrs' needs an eager model.* go bfp, gact, mesa"):
        apply(model, "wtacrs")
    with pytest.raises(ValueError, match=r"kinds must be all of matmul, .* over compiled blocks"):
        apply(model, "mesa", kinds=("linear",))
