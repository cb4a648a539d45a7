"""Training under every policy and pair of policies: a plain loop, honest bytes, gradients, seeds, resumed runs;
which go together; and parts of a model that a loop calls by themselves."""

import copy
import gc
import io
import re
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dsq
from dsq.stash import apply, measure, policy
from dsq.stash.controller import RUNNING, applied
from tests.dsq.gradients import all_gradients, error, gradient
from tests.dsq.stash.census import left_bytes, saved_bytes
from tests.dsq.stash.every_policy import NAMES, NEAR, PAIRS, Checkpointed, small, snapshot, train


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), *PAIRS], ids="+".join)
def test_defaults_work_in_a_plain_loop(names):
    for order in {names, names[::-1]}:
        model, plain = small(0.1), small(0.1)
        before, keys = snapshot(model), list(model.state_dict())
        controllers = [apply(model, name) for name in order]
        losses, random_state = train(model), torch.get_rng_state()
        reference = train(plain)
        assert torch.equal(torch.get_rng_state(), random_state)  # no policy draws from the user's stream
        assert losses[-1] < losses[0]
        assert losses == pytest.approx(reference, rel=0.05)
        assert list(model.state_dict()) == keys
        for name, controller in zip(order, controllers, strict=True):
            assert name in str(controller.report())
            controller.load_state_dict(copy.deepcopy(controller.state_dict()))
            controller.remove()
        assert snapshot(model) == before
        assert applied(model) == {}
        controllers[0].remove()
        twin = copy.deepcopy(model)
        assert train(model) == train(twin)


@pytest.mark.parametrize("name", NAMES)
def test_meter_sees_all_that_a_policy_keeps(name):
    """Nothing hides in a closure, a cache or a cycle from the census of live storages."""
    model, x = small(), torch.randn(8, 16, 32)
    apply(model, name)
    counts = []
    for count in (lambda fn: measure(fn).nbytes, saved_bytes):
        train(model, steps=2)  # gact holds each code twice in the second
        counts.append(count(lambda: model(x.clone()).sum()))
    estimates, random_states = 1024, 2 * torch.get_rng_state().nbytes if name == "checkpoint" else 0
    assert abs(counts[0] - random_states - counts[1]) < estimates


@pytest.mark.parametrize("name", NAMES)
def test_a_stash_goes_with_its_graph_at_once(name):
    """No cycle keeps it until a collection, nor what gact made to adapt by."""
    model, x = small()[:1], torch.randn(8, 16, 32)
    apply(model, name, **{"gact": {"adapt_interval": 1}}.get(name, {}))

    def step():
        model(x).sum().backward()
        model.zero_grad()

    step()  # the first of a process imports what is left to a collection
    gc.collect()
    gc.disable()
    try:
        for run in (step, step, lambda: model(x)):
            assert left_bytes(run) < 1024  # estimates
    finally:
        gc.enable()


@pytest.mark.parametrize("name", NAMES)
def test_evaluation_leaves_nothing_behind(name):
    model, x = small().eval(), torch.randn(2, 16, 32)
    with torch.no_grad():
        expected = model(x)
        apply(model, name)
        assert not model(x).requires_grad
        torch.testing.assert_close(model(x), expected)
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)
    assert not RUNNING.entered
    model(x).sum().backward()
    model.requires_grad_(False)
    assert not model(x).requires_grad
    model(x.requires_grad_()).sum().backward()  # gact measures this step by the gradient of the input alone
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
def test_the_batch_may_change_its_shape(name):
    model, plain, (options, near) = small(), small(), NEAR[name]
    apply(model, name, **options)
    for batch, tokens in ((4, 16), (4, 16), (3, 8), (1, 1), (0, 8), (3, 8), (4, 16)):
        x = torch.randn(batch, tokens, 32)
        exact = gradient(plain, x)
        assert (gradient(model, x) - exact).norm() <= 2 * near * exact.norm()


@pytest.mark.parametrize("name", NAMES)
def test_neither_a_second_forward_nor_a_retained_graph_touches_the_first(name):
    """The second moves every running range; gact measures the first."""
    model, (options, near) = small(), NEAR[name]
    x, second_batch = torch.randn(4, 16, 32), 100 * torch.randn(4, 16, 32)
    true = gradient(model, x)
    apply(model, name, **options)
    for _ in range(3):
        model.zero_grad()
        loss = model(x).square().sum()
        model(second_batch).sum()
        loss.backward(retain_graph=True)
        first_gradient = all_gradients(model).clone()
        assert error(first_gradient, true) <= near
        loss.backward()
        assert torch.equal(all_gradients(model), 2 * first_gradient)


@pytest.mark.parametrize("autocast", [True, False], ids=["autocast", "in PyTorch's checkpoint"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_near_under_autocast_and_inside_of_pytorchs_checkpoint(name, autocast):
    model, x, (options, near) = small(0.1), torch.randn(8, 16, 32), NEAR[name]
    if not autocast and name != "checkpoint":
        model = Checkpointed(model, reentrant=False)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        true = gradient(model, x)
        apply(model, name, **options)
        for _ in range(4):
            assert error(gradient(model, x), true) <= near
        held = measure(lambda: model(x).sum()).tensors if name in ("bfp", "gact", "mesa") else ()
    shapes = {tensor.shape for tensor in held}
    assert not shapes & {(32, 64), (64, 32), (32, 32)}  # of the weights, no copies in bfloat16


@pytest.mark.parametrize("name", [name for name in NAMES if name != "checkpoint"])
def test_second_derivatives_are_refused(name):
    model, x = nn.Sequential(small(), nn.ReLU()), torch.randn(2, 8, 32, requires_grad=True)
    apply(model, name)
    with pytest.raises(RuntimeError, match="differentiable once: create_graph=True is not supported"):
        torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)[0].square().sum().backward()


STOCHASTIC = {"gact": {"bits": 3, "adapt_interval": 2}, "mesa": {}, "wtacrs": {}}


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_seed_decides(name):
    def draw(seed):
        model = small()
        apply(model, name, seed=seed, **STOCHASTIC[name])
        return gradient(model, x), gradient(model, x)

    x = torch.randn(8, 16, 32)
    (first, second), repeated, other = draw(0), draw(0), draw(1)
    assert torch.equal(first, repeated[0])
    assert not torch.equal(first, second)  # the step is in the seed, too
    assert not torch.equal(first, other[0])


@pytest.mark.parametrize("broken_at", [1, 2])  # gact: between remembering a step and adapting by it, too
@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_resumed_run_equals_an_unbroken_one(name, broken_at):
    def new():
        model = small(0.1)
        return model, apply(model, name, **STOCHASTIC[name])

    def step(number):
        if name == "wtacrs":
            controller.set_sample_ids(range(number % 2, number % 2 + 8))
        return gradient(model, batches[number])

    batches = torch.randn(4, 8, 16, 32)
    model, controller = new()
    for number in range(broken_at):
        step(number)
    saved = io.BytesIO()
    torch.save(controller.state_dict(), saved)
    unbroken = [step(number) for number in range(broken_at, 4)]
    model, controller = new()
    saved.seek(0)
    controller.load_state_dict(torch.load(saved))
    for number, expected in enumerate(unbroken, broken_at):
        assert torch.equal(step(number), expected)


def test_a_policy_of_ones_own_keeps_half_of_the_bytes(monkeypatch):
    """The one of docs/extending.md, as it stands there."""
    page = (Path(__file__).parents[3] / "docs" / "extending.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "class Bfloat16" in block)
    monkeypatch.setattr(policy, "_POLICIES", dict(policy._POLICIES))
    exec(code, {"__name__": "page"})
    model, x = small(), torch.randn(8, 16, 32)
    plain, exact = measure(lambda: model(x).sum()).nbytes, gradient(model, x)
    apply(model, "bfloat16")
    assert measure(lambda: model(x).sum()).nbytes < 0.51 * plain
    assert 0 < error(gradient(model, x), exact) < 0.01


def test_pairs_of_policies_share_no_tensors_and_one_around_a_submodule_counts_as_one_inside_does():
    partners = {a: {b for pair in PAIRS for b in pair if a in pair and b != a} for a in NAMES}
    assert partners["checkpoint"] == {"bfp", "gact", "mesa", "selective", "wtacrs"}
    assert partners["bfp"] == {"checkpoint", "selective", "wtacrs"}
    assert "gact" not in partners["mesa"]
    model = nn.Sequential(small(), small())
    controller = apply(model, "bfp")
    with pytest.raises(ValueError, match="'gact' cannot share a model with 'bfp'"):
        apply(model[0], "gact")
    apply(model[0], "selective")
    controller.remove()
    apply(model[0], "bfp")
    apply(model[1], "gact")  # beside it, not inside


X = torch.randn(4, 32, 32, generator=torch.Generator().manual_seed(0))


def whole(model):
    return model(X)


def parts(model):
    """As a method that is not forward calls them."""
    *blocks, norm = model
    x = X
    for block in blocks:
        x = block(x)
    return F.layer_norm(x, (32,), norm.weight, norm.bias)


def held(model, run):
    """The bytes that a step keeps, and its gradient."""
    nbytes = measure(lambda: run(model).square().mean()).nbytes
    model.zero_grad()
    run(model).square().mean().backward()
    return nbytes, all_gradients(model)


def net(policy):
    model = small()
    return model, apply(model, policy)


@pytest.mark.parametrize("policy", ["bfp", "selective"])
def test_a_method_that_is_not_forward_keeps_no_more(policy):
    (of_whole, expected), (of_parts, actual) = held(net(policy)[0], whole), held(net(policy)[0], parts)
    assert of_parts < of_whole + 2 * 2 * X.nbytes  # the sums that blocks begin with are another block's output
    assert of_parts < held(small(), parts)[0] * (0.4 if policy == "bfp" else 1.1)
    assert F.cosine_similarity(actual, expected, 0) > 0.99


@pytest.mark.parametrize("policy", ["mesa", "gact"])
def test_policies_of_whole_forwards_leave_parts_exact(policy):
    model, _ = net(policy)
    for _ in range(2):
        held(model, whole)
    assert held(model, parts)[0] == held(small(), parts)[0]


def test_parts_that_follow_one_another_are_one_forward():
    model, controller = net("bfp")
    model(X)
    of_all = controller.report().raw_bytes
    for _ in range(2):
        parts(model)
        assert 0.8 * of_all < controller.report().raw_bytes <= of_all + 2 * 2 * X.nbytes
    before = controller.report()
    with torch.no_grad():
        parts(model)
    assert controller.report() == before


def test_a_part_that_ends_in_a_checkpoint_leaves_the_bytes_of_the_next_counted():
    first, second = (nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))
    model = nn.Sequential(first, second)
    controller = apply(model, "bfp")
    second(first(X))
    of_both = controller.report().raw_bytes
    first.forward = partial(checkpoint, first.forward, use_reentrant=False)
    first(X)
    of_first = controller.report().raw_bytes
    second(X)
    assert controller.report().raw_bytes - of_first == of_both / 2


class TwoReaders(nn.Module):
    """Two layers that read one input; ``between`` is called after the first."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(2))
        self.between = lambda: None

    def forward(self, x):
        y = self.layers[0](x)
        self.between()
        return y + self.layers[1](x)


def test_parts_in_two_threads_are_two_forwards():
    model = nn.Sequential(TwoReaders(), nn.Sequential(nn.Linear(32, 32), nn.GELU()))
    apply(model, "bfp")
    nbytes = measure(lambda: model[0](X)).nbytes

    def call_second_part():
        thread = Thread(target=model[1], args=(X,))
        thread.start()
        thread.join()

    model[0].between = call_second_part
    assert measure(lambda: model[0](X)).nbytes == nbytes


def test_a_level_that_rises_between_two_parts_holds_for_the_second():
    config = dsq.DSQConfig(levels=("[4,4,4,8]", "[8,8,8,8]"), stash="all")
    model = dsq.convert(nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(2))), config)
    model[0](X)
    dsq.set_level(model, config, 1)
    after_another = measure(lambda: model[1](X)).nbytes
    assert after_another == measure(lambda: model[1](X)).nbytes  # comes again: a forward of its own


@pytest.mark.parametrize("name", ["bfp", "mesa", "gact"])
def test_a_batch_of_gradients_is_that_of_one_after_another_or_refused_in_a_line(name):
    x, upstream = torch.randn(4, 16, 32, requires_grad=True), torch.randn(3, 4, 16, 8)
    layers = nn.Linear(32, 64), nn.ReLU(), nn.Dropout(0.1), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)
    model = nn.Sequential(*layers)
    apply(model, name)
    leaves, y = [x, *model.parameters()], model(x)
    batch = torch.autograd.grad(y, leaves, upstream, is_grads_batched=True, retain_graph=True)
    one_by_one = zip(*(torch.autograd.grad(y, leaves, dy, retain_graph=True) for dy in upstream), strict=True)
    for batched, gradients in zip(batch, one_by_one, strict=True):
        torch.testing.assert_close(batched, torch.stack(gradients))
    attention = nn.TransformerEncoderLayer(32, 2, 32, 0.0, batch_first=True)
    apply(attention, name)
    with pytest.raises(RuntimeError, match="ask for one gradient at a time"):
        torch.autograd.grad(attention(x), x, torch.randn(3, *x.shape), is_grads_batched=True)


def test_a_recomputed_input_is_rounded_no_second_time_where_products_are_not_quantized():
    def gradients(convert):
        torch.manual_seed(0)
        net, x = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32)), torch.randn(128, 64)
        convert(net)
        net(x).square().sum().backward()
        return net[2].weight.grad, net[0].bias.grad

    packed = gradients(lambda net: dsq.stash.apply(net, "bfp", bits=4))
    assert all(map(torch.equal, gradients(lambda net: dsq.convert(net, "[-,4,-,-]")), packed))
