"""Compilers, torch.func and torch.export: one graph, the same bits; or one clear line."""

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import dsq
from tests.dsq.gradients import error, same, step

CONFIG = dsq.DSQConfig(levels=("[4,4,4,16]", "[16,4,4,16]"), stash="linears")
STOCHASTIC = dsq.DSQConfig(levels="[4,4,4,16]", rounding="stochastic", stash="linears")


class SharedInput(nn.Module):
    """Three layers of one input, whose stash is one, and a fourth."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

    def forward(self, x):
        return self.out(nn.functional.gelu(self.q(x) * self.k(x) + self.v(x)))


def block(config=CONFIG):
    torch.manual_seed(0)
    return dsq.convert(SharedInput(), config)


@pytest.mark.parametrize(("stash", "most"), [("linears", 0), ("all", 0.1)])  # a graph makes nothing again of codes
def test_compiled_in_one_graph_and_once_more_for_a_level(stash, most, fresh_compiler):
    config = dsq.DSQConfig("[4,4,4,8] [8,8,8,8]", stash=stash)
    eager, net = (block(config) for _ in range(2))
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True, dynamic=True)
    for level, length in ((0, 16), (0, 48), (1, 48)):
        for model in (eager, net):
            dsq.set_level(model, config, level)
        x = torch.randn(2, length, 32, requires_grad=True)
        pairs = zip(step(net, x, run=compiled), step(eager, x), strict=True)
        assert all(torch.equal(*pair) if most == 0 else error(*pair) < most for pair in pairs)
    if stash == "linears":  # once for q, k and v, which read one input, and for out
        saved = compiled(x).grad_fn.saved_tensors
        assert sum(t.nbytes for t in saved if t.dtype == torch.uint8) == 2 * x.numel() * 8.5 / 8
    assert counters["stats"]["unique_graphs"] == 2
    assert not counters["graph_break"]


@pytest.mark.parametrize("stash", ["linears", "all"])
def test_blocks_compiled_before_fully_shard_follow_a_level(one_process, fresh_compiler, stash):
    config = dsq.DSQConfig(levels="[4,4,4,16] [16,6,4,16]", stash=stash)
    plain = nn.Sequential(SharedInput(), SharedInput())
    net, eager = (dsq.convert(copy.deepcopy(plain), config) for _ in range(2))
    for name, inner in list(net.named_children()):
        net.register_module(name, torch.compile(inner, backend="aot_eager", fullgraph=True))
        fully_shard(net[int(name)], mesh=init_device_mesh("cpu", (1,)))
    for level in (0, 1):
        dsq.set_level(net, config, level)
        dsq.set_level(eager, config, level)
        x = torch.randn(2, 32, 32, requires_grad=True)
        for place, (actual, exact) in enumerate(zip(step(net, x), step(eager, x), strict=True)):
            most = 0 if stash == "linears" else 0.15 if place == 1 else 0.1  # the second is the gradient of x
            assert error(getattr(actual, "to_local", lambda actual=actual: actual)(), exact) < 1e-5 + most


@pytest.mark.parametrize("config", [CONFIG, STOCHASTIC], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_graph_gives_the_forward_draws_anew_and_refuses_the_backward_and_onnx(strict, config, monkeypatch):
    net, x = block(config), torch.randn(2, 16, 32)
    exported = torch.export.export(net, (x,), strict=strict).module()
    torch.manual_seed(1)
    first, second = exported(x), exported(x)
    torch.manual_seed(1)
    assert torch.equal(first, net(x))
    assert torch.equal(first, second) == (config is CONFIG)
    with pytest.raises(RuntimeError, match=r"not in a graph of torch\.export"):
        exported(x).sum().backward()
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with pytest.raises(RuntimeError, match=r"call dsq.unconvert\(model\) before torch.onnx.export"):
        torch.export.export(net, (x,), strict=False)


def test_stochastic_rounding_in_one_graph_draws_what_eager_mode_draws(fresh_compiler):
    net = dsq.convert(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), STOCHASTIC)
    x, compiled = torch.randn(2, 16, 32), torch.compile(net, backend="aot_eager", fullgraph=True)
    assert same(step(net, x, run=compiled), step(net, x))
    assert not torch.equal(compiled(x), compiled(x))


def loss_of_weights(net, x):
    return lambda weights: torch.func.functional_call(net, weights, (x,)).sum()


def batch_of_gradients(net, x):
    return torch.autograd.grad(net(x), x, torch.ones(2, 64, 32), is_grads_batched=True)


REFUSED = {
    "torch.jit.trace": (lambda net, x: torch.jit.trace(net, x), r"torch\.jit\.trace takes .*dsq\.unconvert"),
    "torch.jit.script": (lambda net, x: torch.jit.script(net), r"torch\.jit\.script takes .*dsq\.unconvert"),
    "torch.fx": (lambda net, x: torch.fx.symbolic_trace(net), r"torch\.fx takes .*dsq\.unconvert"),
    "grad": (lambda net, x: torch.func.grad(loss_of_weights(net, x))(dict(net.named_parameters())), r"torch\.func"),
    "vmap": (lambda net, x: torch.vmap(net)(x), r"torch\.func"),
    "a batch of gradients": (batch_of_gradients, "without memory of its own, as vmap, is_grads_batched=True"),
    "the gradient of a gradient": (
        lambda net, x: torch.autograd.grad(net(x).sum(), x, create_graph=True), "differentiable once"
    ),
}  # fmt: skip


@pytest.mark.parametrize("tool", REFUSED)
@pytest.mark.parametrize("stash", ["linears", "all"])
def test_tools_that_cannot_follow_are_refused_in_a_line(tool, stash):
    (run, message), x = REFUSED[tool], torch.randn(64, 32, requires_grad=True)
    net = dsq.convert(nn.Sequential(nn.Linear(32, 32), nn.GELU()), dsq.DSQConfig(stash=stash))
    with pytest.raises((RuntimeError, TypeError), match=message):
        run(net, x)
    assert torch.equal(loss_of_weights(net, x)(dict(net.named_parameters())), net(x).sum())
    with torch.no_grad():
        assert torch.equal(torch.jit.trace(net, x)(2 * x), net(2 * x))
