"""Every kind of layer: at full width the plain one; quantized whole; copied, pickled, compiled and taken back."""

import copy
import pickle
from types import MethodType

import pytest
import torch

import dsq
from tests.dsq.gradients import same, step
from tests.dsq.layers.kinds import KINDS, ROUTED, made


@pytest.fixture(autouse=True)
def quantize_small_matrices(monkeypatch):
    monkeypatch.setattr("dsq.layers.own_products.MIN_QUANTIZED_MACS", 0)


CONFIG = dsq.DSQConfig(levels="[4,4,4,16]", attention=True, stash="linears")


@pytest.mark.parametrize("kind", KINDS)
def test_at_full_width_it_is_the_plain_layer_and_becomes_that_again(kind):
    net, plain, inputs = made(kind), made(kind), KINDS[kind][1]()
    dsq.convert(net, dsq.DSQConfig(levels="[32,32,32,32]", attention=True, stash="linears"))
    assert dsq.converted(net) or type(net[0]) is not type(plain[0])
    torch.testing.assert_close(step(net, *inputs), step(plain, *inputs), rtol=1e-4, atol=1e-4)
    assert list(net.state_dict()) == list(plain.state_dict())
    dsq.unconvert(net)
    assert [type(module) for module in net.modules()] == [type(module) for module in plain.modules()]
    assert list(net.state_dict()) == list(plain.state_dict())


@pytest.mark.parametrize("kind", KINDS)
def test_unconverted_under_a_wrapper_of_its_forward_it_is_the_plain_layer(kind):
    net, plain, inputs = dsq.convert(made(kind), CONFIG), made(kind), KINDS[kind][1]()
    for module in net.modules():
        wrapped = torch.autocast("cpu", enabled=False)(module.forward.__func__)  # as accelerate's prepare
        module.forward = MethodType(wrapped, module)
    assert same(step(dsq.unconvert(net), *inputs), step(plain, *inputs))


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_quantized_and_a_layer_is_copied_and_pickled(kind):
    net, inputs = dsq.convert(made(kind), CONFIG), KINDS[kind][1]()
    report = dsq.report(net, *inputs)
    assert (report.forward.share, report.backward.share, report.skipped) == (1, 1, ())
    y = step(net, *inputs)[0]
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(twin) is type(net)
        assert torch.equal(step(twin, *inputs)[0], y)
    whole = dsq.convert(made(kind), dsq.DSQConfig(levels="[4,4,4,16]", attention=True, stash="all"))
    twin, packed = copy.deepcopy(whole), step(whole, *inputs)
    assert torch.equal(packed[0], y)
    assert same(step(twin, *inputs), packed)
    assert type(dsq.unconvert(twin)) is type(made(kind))
    assert same(step(whole, *inputs), packed)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in (*ROUTED, "grouped")])  # counts break a graph
def test_compiled_in_one_graph(kind, fresh_compiler):
    net, inputs = dsq.convert(made(kind), CONFIG), KINDS[kind][1]()
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(step(net, *inputs, run=compiled), step(net, *inputs), rtol=1e-3, atol=1e-3)
