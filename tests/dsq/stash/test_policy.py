"""The interface, and what every policy owes it: a plain loop, honest bytes, exact removal, clear errors."""

import copy
import io
import itertools
import pickle
import threading

import pytest
import torch
from torch import nn
from torch.overrides import _get_current_function_mode
from torch.utils.checkpoint import checkpoint

from analysis.models import encoder
from dsq.stash import apply, measure, policies
from dsq.stash.controller import Controller
from dsq.stash.policy import applied, compatible
from dsq.stash.saved_tensors.hooks import active_contexts, around_forward, innermost_hooks, take_off_leftovers
from tests.dsq.stash.census import kept_bytes
from tests.dsq.stash.gradients import all_gradients, error, gradient

NAMES = ("bfloat16", "bfp", "checkpoint", "gact", "mesa", "selective", "wtacrs")
PAIRS = [(a, b) for a, b in itertools.combinations(NAMES, 2) if compatible(a, b)]


def small(dropout=0.0):
    torch.manual_seed(0)
    return encoder(blocks=2, width=32, heads=4, ffn=64, dropout=dropout)


def train(model, steps=4, seed=3):
    """A plain loop; the losses."""
    torch.manual_seed(seed)
    x, y = torch.randn(8, 16, 32), torch.randn(8, 16, 32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def snapshot(model):
    """Everything remove() must restore."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooks += ("_forward_hooks_always_called", "_forward_hooks_with_kwargs", "_forward_pre_hooks_with_kwargs")
    return [(type(m), sorted(m.__dict__), *(list(getattr(m, h)) for h in hooks)) for m in model.modules()]


def test_all_policies_are_registered():
    assert policies() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_defaults_work_in_a_plain_loop(name):
    model, plain = small(), small()
    before, keys = snapshot(model), list(model.state_dict())
    controller = apply(model, name)
    losses, reference = train(model), train(plain)
    assert losses[-1] < losses[0]
    assert losses == pytest.approx(reference, rel=0.05)
    assert name in str(controller.report())
    assert list(model.state_dict()) == keys
    controller.load_state_dict(copy.deepcopy(controller.state_dict()))
    controller.remove()
    assert snapshot(model) == before
    controller.remove()
    twin = copy.deepcopy(model)
    assert train(model) == train(twin)


@pytest.mark.parametrize("name", ["gact", "mesa", "wtacrs"])
def test_the_state_of_another_model_is_refused(name):
    models = nn.Linear(32, 8), nn.Linear(32, 4), nn.Linear(32, 8, bias=False)
    same, narrow, other = (apply(model, name).state_dict() for model in models)
    controller = apply(nn.Linear(32, 8), name)
    with pytest.raises(ValueError, match=r"must be this model's, whose weight is \(8, 32\); the state's is \(4, 32\)$"):
        controller.load_state_dict(narrow)
    with pytest.raises(ValueError, match=r"whose bias is \(8,\); the state's is none$"):
        controller.load_state_dict(other)
    controller.load_state_dict(same)


@pytest.mark.parametrize("name", NAMES)
def test_meter_sees_all_that_a_policy_keeps(name):
    """Against the census of live storages: nothing hides in a closure, a cache or a cycle."""
    model, x = small(), torch.randn(8, 16, 32)
    apply(model, name)
    counts = []
    for count in (lambda fn: measure(fn).nbytes, kept_bytes):
        train(model, steps=1)
        counts.append(count(lambda: model(x.clone()).sum()))
    estimates, random_states = 1024, 2 * torch.get_rng_state().nbytes if name == "checkpoint" else 0
    assert abs(counts[0] - random_states - counts[1]) < estimates


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
    assert active_contexts() == ()
    model(x).sum().backward()
    model.requires_grad_(False)
    assert not model(x).requires_grad


@pytest.mark.parametrize("name", NAMES)
def test_the_batch_may_change_its_shape(name):
    model = small()
    apply(model, name)
    for batch, tokens in ((4, 16), (3, 8), (1, 1), (0, 8), (4, 16)):
        model.zero_grad()
        model(torch.randn(batch, tokens, 32)).square().sum().backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", ["bfp", "checkpoint", "selective"])  # the stochastic ones have tests of their own
def test_neither_a_second_forward_nor_a_retained_graph_touches_the_first(name):
    model = small()
    apply(model, name)
    x = torch.randn(4, 16, 32)
    alone = gradient(model, x)
    model.zero_grad()
    loss = model(x).square().sum()
    model(100 * torch.randn(4, 16, 32)).sum()
    loss.backward(retain_graph=True)
    assert torch.equal(all_gradients(model), alone)
    loss.backward()
    assert torch.equal(all_gradients(model), 2 * alone)


#: options under which the gradient is near the true one, and how near
NEAR = {
    "bfloat16": ({}, 0.01),
    "bfp": ({"bits": 8}, 0.05),
    "checkpoint": ({}, 0),
    "gact": ({"bits": 8, "adapt_interval": 2}, 0.05),
    "mesa": ({}, 0.05),
    "selective": ({}, 0),
    "wtacrs": ({"ratio": 1.0}, 0.01),
}


@pytest.mark.parametrize("name", NAMES)
def test_autocast(name):
    model, x, (options, near) = small(0.1), torch.randn(8, 16, 32), NEAR[name]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        true = gradient(model, x)
        apply(model, name, **options)
        for _ in range(4):
            assert error(gradient(model, x), true) <= near


@pytest.mark.parametrize("name", [name for name in NAMES if name != "checkpoint"])
def test_inside_pytorchs_checkpoint(name):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small(0.1)

        def forward(self, x):
            return checkpoint(self.inner, x + 0, use_reentrant=False)

    model, x, (options, near) = Checkpointed(), torch.randn(8, 16, 32), NEAR[name]
    true = gradient(model, x)
    apply(model, name, **options)
    for _ in range(3):
        assert error(gradient(model, x), true) <= near


@pytest.mark.parametrize("name", NAMES)
def test_the_users_random_stream_is_untouched(name):
    model, plain = small(0.1), small(0.1)
    apply(model, name)
    states = []
    for one in (model, plain):
        train(one)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


STOCHASTIC = {
    "bfp": {"rounding": "stochastic"},
    "gact": {"bits": 3, "adapt_interval": 2},
    "mesa": {},
    "wtacrs": {},
}


@pytest.mark.parametrize("name", STOCHASTIC)
def test_the_seed_decides(name):
    def draw(seed):
        model = small()
        apply(model, name, seed=seed, **STOCHASTIC[name])
        return gradient(model, x)

    x = torch.randn(8, 16, 32)
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


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


def gradient_penalty(model, x):
    """Gradients of a loss on a gradient."""
    (g,) = torch.autograd.grad(model(x).pow(3).sum(), x, create_graph=True)
    model.zero_grad()
    g.square().sum().backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), ("selective", "bfp")], ids="+".join)
def test_second_derivatives_are_exact_or_refused(names):
    model, x = small(), torch.randn(2, 8, 32, requires_grad=True)
    for name in names:
        apply(model, name)
    if names == ("selective",):
        pairs = zip(gradient_penalty(model, x), gradient_penalty(small(), x), strict=True)
        assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
        return
    with pytest.raises(RuntimeError, match="differentiable once: create_graph=True is not supported"):
        gradient_penalty(model, x)


@pytest.mark.parametrize("name", ["bfloat16", "bfp", "gact", "mesa", "selective", "wtacrs"])
def test_sparse_tensors_are_left_alone(name):
    class Graph(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(32, 32)
            self.register_buffer("adjacency", torch.eye(16).to_sparse())

        def forward(self, x):
            return torch.sparse.mm(self.adjacency, self.lin(x).relu())

    model, x = Graph(), torch.randn(16, 32)
    apply(model, name)
    model(x).sum().backward()
    torch.testing.assert_close(model.lin.bias.grad, (model.lin(x) > 0).sum(0).float())
    assert measure(lambda: model(x).sum()).nbytes > 0


@pytest.mark.parametrize("pair", PAIRS, ids="+".join)
def test_pairs(pair):
    for order in (pair, pair[::-1]):
        model = small()
        before = snapshot(model)
        controllers = [apply(model, name) for name in order]
        losses = train(model)
        assert losses[-1] < losses[0]
        for controller in controllers:
            controller.remove()
        assert snapshot(model) == before
        assert applied(model) == {}


def test_which_pairs_there_are():
    partners = {a: {b for pair in PAIRS for b in pair if a in pair and b != a} for a in NAMES}
    assert partners["checkpoint"] == {"bfloat16", "bfp", "gact", "mesa", "selective", "wtacrs"}
    assert partners["bfp"] == {"checkpoint", "selective", "wtacrs"}
    assert "gact" not in partners["mesa"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_stash(name):
    for model in (nn.Identity(), nn.Sequential()):
        with pytest.raises(ValueError, match="nothing to stash"):
            apply(model, name)


def test_twice_and_together():
    model = small()
    controller = apply(model, "bfp")
    with pytest.raises(ValueError, match="policy 'bfp' is already applied to this model; call remove"):
        apply(model, "bfp")
    with pytest.raises(ValueError, match=r"'gact' cannot share a model with 'bfp'; it goes with .*checkpoint"):
        apply(model, "gact")
    outer = nn.Sequential(model)
    with pytest.raises(ValueError, match="already applied to this submodule '0' of the model"):
        apply(outer, "bfp")
    controller.remove()
    apply(outer, "gact")


def test_a_policy_around_a_submodule_counts_as_one_inside_does():
    model = nn.Sequential(small(), small())
    controller = apply(model, "bfp")
    with pytest.raises(ValueError, match="policy 'bfp' is already applied to a model around this one; call remove"):
        apply(model[0], "bfp")
    with pytest.raises(ValueError, match="'gact' cannot share a model with 'bfp'"):
        apply(model[0], "gact")
    apply(model[0], "selective")
    controller.remove()
    apply(model[0], "bfp")
    apply(model[1], "gact")  # beside it, not inside


def test_contexts_are_left_when_a_forward_raises_and_nest_once():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.depth = 0

        def forward(self, x, depth):
            entered.append(len(active_contexts()))
            if depth == 0:
                raise KeyError("inside")
            return self(x, depth - 1)

    entered, model = [], Model()
    around_forward(Controller(model), model, lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
    with pytest.raises(KeyError):
        model(torch.ones(1), 2)
    assert entered == [1, 1, 1]
    assert active_contexts() == ()
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_threads_do_not_see_each_other():
    """nn.DataParallel runs replicas in threads."""
    model, seen = small(), []
    apply(model, "bfp")

    def work():
        model(torch.randn(1, 4, 32)).sum().backward()
        seen.append(active_contexts())

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [()] * 3


def test_a_deep_copy_keeps_the_policy():
    model = small()
    apply(model, "bfp")
    twin, x = copy.deepcopy(model), torch.randn(2, 8, 32)
    assert measure(lambda: twin(x).sum()).nbytes == measure(lambda: model(x).sum()).nbytes
    with pytest.raises(ValueError, match="already applied"):
        apply(twin, "bfp")


@pytest.mark.parametrize("name", NAMES)
def test_a_deep_copy_is_freed_of_its_policy(name):
    model, plain = small(), small()
    before = snapshot(plain)
    controller = apply(model, name)
    twin = copy.deepcopy(model)
    controller.remove(twin)
    assert snapshot(twin) == before
    assert applied(model) == {name: controller}
    assert train(twin) == train(plain)
    with pytest.raises(ValueError, match="copy must be a deep copy of the model, made under its policy"):
        controller.remove(twin)
    late = copy.deepcopy(model)
    controller.remove()
    assert snapshot(model) == before
    controller.remove(late)
    assert snapshot(late) == before
    apply(late, name)


@pytest.mark.parametrize("name", NAMES)
def test_a_model_under_a_policy_refuses_to_be_pickled_and_its_state_does_not(name):
    model = small()
    controller = apply(model, name)
    with pytest.raises(TypeError, match=r"cannot be pickled: save its state_dict\(\), or call remove\(\)"):
        pickle.dumps(model)
    pickle.loads(pickle.dumps(model.state_dict()))
    controller.remove()
    assert train(pickle.loads(pickle.dumps(model))) == train(model)


@pytest.mark.parametrize("name", NAMES)
def test_a_policy_removed_inside_a_forward_ends_with_it(name):
    model, plain = small(), small()
    controller = apply(model, name)
    handle = model[0].register_forward_hook(lambda *_: controller.remove())
    model(torch.randn(8, 16, 32)).sum().backward()
    handle.remove()
    model.zero_grad()
    assert innermost_hooks() is None
    assert _get_current_function_mode() is None
    assert not active_contexts()
    assert snapshot(model) == snapshot(plain)
    assert train(model) == train(plain)


@pytest.mark.parametrize("names", [*((name,) for name in NAMES), *PAIRS], ids="+".join)
def test_a_forward_that_is_interrupted_is_left(names):
    """PyTorch calls no hook after a KeyboardInterrupt: before the next forward, or by remove()."""
    model, x = small(), torch.randn(8, 16, 32)
    controllers = [apply(model, name) for name in names]
    model(x).sum().backward()
    held = measure(lambda: model(x).sum()).nbytes

    def interrupt(*_):
        raise KeyboardInterrupt

    def interrupted():
        handle = list(model.modules())[-1].register_forward_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(x)
        handle.remove()

    interrupted()
    assert measure(lambda: model(x).sum()).nbytes == held
    take_off_leftovers()
    assert innermost_hooks() is None
    interrupted()
    for controller in controllers:
        controller.remove()
    take_off_leftovers()
    assert innermost_hooks() is None
    assert not active_contexts()


def test_torch_func_is_refused_in_a_line():
    model = nn.Sequential(nn.Linear(16, 16))
    apply(model, "bfp")
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters):
        return torch.func.functional_call(model, parameters, torch.ones(64, 16)).sum()

    with pytest.raises(RuntimeError, match=r"stash policies do not go with torch\.func"):
        torch.func.grad(loss)(parameters)
    assert loss(parameters).isfinite()
