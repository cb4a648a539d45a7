"""WTA-CRS and all that a training loop may do: two forwards, freed memory, resumes, casts, copies, other policies."""

import gc

import pytest
import torch
from torch import Tensor, nn

import dsq.stash
from dsq.stash.wtacrs.rows import RowSample
from tests.dsq.stash.every_policy import Checkpointed
from tests.dsq.stash.wtacrs.sampled import (
    Attention,
    attention,
    check_unbiased,
    gradients,
    loss_weights,
    saved,
    tokens,
)


def test_a_second_forward_before_the_backward():
    """Two forwards on one input: two draws; each gradient is what it would be alone."""
    model, x = attention(), tokens()
    controller = dsq.stash.apply(model, "wtacrs", seed=3)
    alone = [gradients(model, x), gradients(model, x)]
    controller.remove()
    dsq.stash.apply(model, "wtacrs", seed=3)
    outs = [model(x), model(x)]
    dz = loss_weights(outs[0])
    for out, expected in zip(reversed(outs), reversed(alone), strict=True):
        model.zero_grad()
        (out * dz).sum().backward()
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, expected[name])


def test_an_input_that_outlives_steps_is_drawn_anew_each_time():
    model, x = nn.Sequential(nn.Linear(16, 8)), tokens()
    dsq.stash.apply(model, "wtacrs")
    outs, draws = [], set()
    for _ in range(5):
        model.zero_grad()
        outs.append(model(x))  # the graphs live on
        outs[-1].sum().backward()
        draws.add(model[0].weight.grad.sum().item())
    assert len(draws) == 5


def test_an_input_changed_in_place_is_drawn_anew():
    class Changing(Attention):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x) + 1
            q = self.q(x)
            x.mul_(2)
            return self.o(q + self.k(x))

    torch.manual_seed(0)
    model = Changing()
    controller = dsq.stash.apply(model, "wtacrs")
    out = model(tokens())
    assert "3 draws, read by 3 linears" in str(controller.report())
    out.sum().backward()


def test_memory_used_again_is_not_mistaken_for_the_same_activation():
    """Activations of one size that die at once land on one address; each must have rows of its own."""
    layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
    model = nn.Sequential(*[nn.Sequential(layer, nn.Sigmoid(), Doubling()) for layer in layers])
    controller = dsq.stash.apply(model, "wtacrs")
    out = model(torch.randn(8, 12, 16))
    assert "6 draws, read by 6 linears" in str(controller.report())
    out.sum().backward()


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def test_a_graph_thrown_away_takes_its_rows_with_it():
    def samples():
        gc.collect()
        return sum(type(it) is RowSample for it in gc.get_objects())

    model, x = nn.Sequential(nn.Linear(16, 8)), tokens()
    dsq.stash.apply(model, "wtacrs")
    before = samples()
    for _ in range(3):
        model(x)
    assert samples() == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_the_recomputed_rows_are_the_ones_used(reentrant):
    """Rows, numbers and scales of different draws would be a wrong gradient: its mean must be the true one."""
    model, x = Checkpointed(attention(), reentrant), tokens()
    exact = gradients(model, x)
    dsq.stash.apply(model, "wtacrs")
    estimates = [gradients(model, x) for _ in range(80)]
    torch.testing.assert_close(estimates[-1]["input"], exact["input"])
    check_unbiased([e["inner.k.weight"] for e in estimates], exact["inner.k.weight"], tolerance=0.08)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype):
    model, x = attention(), tokens()
    dsq.stash.apply(model, "wtacrs")
    with torch.autocast("cpu", dtype=dtype):
        kept = saved(model, x)
        out = model(x)
    assert out.dtype == dtype
    assert [t.dtype for t in kept if t.shape == (29, 16)] == [dtype] * 2
    out.float().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


@pytest.mark.parametrize("where", ["activation", "gradient"])
def test_an_overflow_reaches_the_weight_gradient(where):
    """Also one in a row that is not kept: a loss scaler must skip the step."""
    model, x = nn.Sequential(nn.Linear(16, 8, bias=False)), torch.randn(96, 16)
    dsq.stash.apply(model, "wtacrs", ratio=0.05)
    dz = torch.ones(96, 8)
    (x if where == "activation" else dz)[17, 3] = torch.inf
    model(x).backward(dz)
    assert not model[0].weight.grad.isfinite().all()


def test_tied_and_shared_modules_and_the_state_dict():
    shared = nn.Linear(16, 16)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(16, 16))
    model[3].weight = shared.weight
    keys, x = list(model.state_dict()), tokens()
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs")
    assert controller.attached == ("0", "3")
    assert list(model.state_dict()) == keys
    check_unbiased([gradients(model, x)["0.weight"] for _ in range(400)], exact["0.weight"], tolerance=0.03)
    controller.remove()
    assert type(shared) is nn.Linear
    assert "_wtacrs" not in shared.__dict__
    assert all(torch.equal(g, exact[n]) for n, g in gradients(model, x).items())


@pytest.mark.parametrize("order", [("wtacrs", "bfp"), ("bfp", "wtacrs")])
def test_another_policy_packs_the_rows_once(order):
    model, x = attention(), tokens(1, 8, 40)
    alone = dsq.stash.apply(model, "wtacrs")
    model(x)
    rows = alone.report().kept_bytes
    alone.remove()
    for name in order:
        dsq.stash.apply(model, name, **({"bits": 4, "format": "bfp"} if name == "bfp" else {}))
    report = dsq.stash.measure(lambda: model(x))
    linears = [h for h in report.held if "SampledLinear" in h.op]
    assert not [h for h in linears if h.dtype == "float32"]
    codes = sum(h.nbytes for h in linears if h.dtype == "uint8")
    index = sum(h.nbytes for h in linears if h.dtype == "int32")
    assert codes == (rows - index) * 4.5 / 32
    model(x).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


def test_rows_packed_by_another_policy_still_give_the_gradient():
    """16 bits are nearly exact: the same draw with and without them gives nearly the same gradient."""
    x, grads = tokens(), []
    for packed in (False, True):
        model = attention()
        dsq.stash.apply(model, "wtacrs", seed=2)
        if packed:
            dsq.stash.apply(model, "bfp", bits=16)
        grads.append(gradients(model, x))
    for name, g in grads[0].items():
        torch.testing.assert_close(grads[1][name], g, rtol=1e-3, atol=1e-3 * g.abs().max().item())
