"""gact in a plain loop: what it leaves as it was, levels, casts, losses, and mistakes."""

import copy
import gc

import pytest
import torch
from torch import Tensor, nn

from dsq import stash
from dsq.stash.gact import Dual
from dsq.stash.interception import innermost_hooks
from tests.dsq.gradients import all_gradients, error
from tests.dsq.stash.gact.models import Encoder, Sensitive, bits_used, make, rows, step, tokens


def train(model: nn.Module, steps: int) -> Tensor:
    torch.manual_seed(0)
    for number in range(steps):
        step(model, tokens(number))
    return torch.get_rng_state()


def test_adaptation_touches_no_grad_no_buffer_and_no_random_stream() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.norm = Encoder(0.1), nn.BatchNorm1d(5)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.encoder(x))

    plain, adapted = make(Noisy), make(Noisy)
    stash.apply(adapted, "gact", bits=8, adapt_interval=1)
    states = [train(model, 4) for model in (plain, adapted)]
    assert torch.equal(*states)
    for one, other in zip(plain.buffers(), adapted.buffers(), strict=True):
        assert torch.equal(one, other)
    assert error(all_gradients(adapted), all_gradients(plain)) < 0.1


def test_a_model_whose_gradient_never_came_back_has_one_code_a_tensor() -> None:
    model = make(Encoder)
    controller = stash.apply(model, "gact", adapt_interval=1)
    model(tokens())
    kept = controller.report().kept_bytes
    model(tokens())
    assert controller.report().kept_bytes == kept


def test_outputs_of_which_one_is_made_of_another() -> None:
    class Two(Sensitive):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y = super().forward(x)
            return {"y": y, "loss": y.square().mean()}

    plain, model = make(Two), make(Two)
    controller = stash.apply(model, "gact", bits=8, adapt_interval=1)
    for _ in range(3):
        for it in (plain, model):
            it.zero_grad()
            out = it(rows())
            (out["y"].sum() + out["loss"]).backward()
        assert error(all_gradients(model), all_gradients(plain)) < 0.05
    assert controller.plan.measured


def test_measured_gradients_are_those_of_the_step() -> None:
    """The step that is measured has the gradient that it would have had: both draw the same noise, and codes."""
    found = []
    for interval in (1, None):
        model = make(Sensitive)
        stash.apply(model, "gact", bits=4, adapt_interval=interval)
        found.append([step(model, rows()) for _ in range(2)])
    for measured, unmeasured in zip(*found, strict=True):
        assert torch.equal(measured, unmeasured)


def test_a_stash_goes_with_its_graph() -> None:
    """At once, also what an adaptation made: no cycle keeps it until a collection."""

    def codes() -> int:
        found = [it for it in gc.get_objects() if type(it) in (Dual, Tensor)]
        return sum(type(it) is not Tensor or (it.dtype == torch.uint8 and it.shape != random.shape) for it in found)

    model, random = make(Encoder), torch.get_rng_state()  # which is remembered with a step
    stash.apply(model, "gact", adapt_interval=1)
    gc.collect()
    gc.disable()
    try:
        before = codes()
        for _ in range(3):
            out = model(tokens())
            assert codes() > before
            out.sum().backward()
            del out
            assert codes() == before
        model(tokens())
        assert codes() == before
    finally:
        gc.enable()


def test_batches_of_changing_shape_stay_within_budget_and_true() -> None:
    model = make(Encoder)
    controller = stash.apply(model, "gact", bits=6)
    for length in (12, 12, 7, 20, 7, 12, 20):
        got = step(model, tokens(length, length))
        assert bits_used(controller.report()) <= 6
        assert error(got, step(make(Encoder), tokens(length, length))) < 0.1


def test_another_list_of_tensors_is_measured_again() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.deep = nn.Linear(32, 32), nn.Linear(32, 4), False

        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(self.first(x))
            return self.second(torch.tanh(self.first(x)) if self.deep else x)

    model = make(Branch)
    controller = stash.apply(model, "gact", bits=4, adapt_interval=10)
    for number in range(8):
        model.deep = number > 3
        true = copy.deepcopy(model)
        got = step(model, rows())
        assert error(got, step_without(true, rows())) < 0.2
    assert len(controller.plan.measured) == 2


def step_without(model: nn.Module, x: Tensor) -> Tensor:
    """The true gradient: a copy of the model carries the policy's hooks, a fresh one with its weights does not."""
    plain = type(model)()
    plain.load_state_dict(model.state_dict())
    plain.deep = model.deep
    return step(plain, x)


def test_codes_go_to_the_host_by_pytorchs_own_context() -> None:
    """The paper's level L2."""
    models = [make(Encoder), make(Encoder)]
    for model in models:
        stash.apply(model, "gact")
    for number in range(3):
        with torch.autograd.graph.save_on_cpu():
            ours = step(models[0], tokens(number))
        assert torch.equal(ours, step(models[1], tokens(number)))


@pytest.mark.parametrize("level", ["CB1", "CB2"])
def test_checkpointing_levels(level: str) -> None:
    plain, model = make(Encoder), make(Encoder)
    kept = []
    for policy_level in ("L1", level):
        controller = stash.apply(model, "gact", bits=8, level=policy_level, adapt_interval=2)
        for number in range(4):
            assert error(step(model, tokens(number)), step(plain, tokens(number))) < 0.05
        kept.append(controller.report().kept_bytes)
        controller.remove()
    assert kept[1] < kept[0] / 4
    assert torch.equal(step(model, tokens()), step(plain, tokens()))


def test_memory_efficient_attention_keeps_no_map() -> None:
    model = make(Encoder)
    stash.apply(model, "gact", level="CB2")
    names = {node.name() for node in _nodes(model(tokens()).sum())}
    assert "SoftmaxBackward0" not in names


def _nodes(out: Tensor) -> set[object]:
    queue, seen = [out.grad_fn], set()
    while queue:
        node = queue.pop()
        if node is not None and node not in seen:
            seen.add(node)
            queue.extend(child for child, _ in node.next_functions)
    return seen


def test_an_overflow_is_not_measured() -> None:
    model = make(Sensitive)
    controller = stash.apply(model, "gact")
    for _ in range(2):
        model(rows()).mul(float("inf")).sum().backward()
    assert not controller.plan.measured
    step(model, rows())
    step(model, rows())
    assert controller.plan.measured


def test_frozen_parameters_and_evaluation() -> None:
    model = make(Sensitive).requires_grad_(False)
    controller = stash.apply(model, "gact", bits=8)
    x = rows().requires_grad_()
    for _ in range(3):
        x.grad = None
        model(x).sum().backward()
    true = rows().requires_grad_()
    make(Sensitive)(true).sum().backward()
    assert error(x.grad, true.grad) < 0.05
    assert controller.plan.measured
    with torch.no_grad():
        model(rows())
    controller.remove()
    assert innermost_hooks() is None


def test_a_refused_level_leaves_the_model_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"checkpoint|segments"):
        stash.apply(model, "gact", level="CB1")
    stash.apply(model, "gact").remove()
