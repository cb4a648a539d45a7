"""WTA-CRS: rows and scales against the paper's formulas; exact and unbiased gradients, what is kept, and loops."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dsq.stash
from dsq.stash.methods.wtacrs import NORM_FLOOR, probabilities, sample_rows
from tests.dsq.gradients import error, saving
from tests.dsq.stash.every_policy import Checkpointed


class Attention(nn.Module):
    """q, k and v read one input, which dies with the forward."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v = nn.Linear(width, width, bias=False)
        self.o = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x)
        return self.o(torch.relu(self.q(x) * self.k(x) + self.v(x)))


def attention(seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    return Attention()


def tokens(seed: int = 1, *lead: int) -> Tensor:
    """Tokens of very different sizes."""
    g, lead = torch.Generator().manual_seed(seed), lead or (8, 12)
    return torch.randn(*lead, 16, generator=g) * torch.rand(*lead, 1, generator=g).mul(3).exp() * 0.1


def gradients(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Gradients of a weighted sum, whose dZ depends on no sampling."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    out = model(x)
    (out * loss_weights(out)).sum().backward()
    return {"input": x.grad, **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def loss_weights(out: Tensor) -> Tensor:
    return 1 + 0.5 * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))


def saved(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Tensors that a forward saves, parameters and repeated storages left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tensors = {t.untyped_storage().data_ptr(): t for t in saving(model, x)[1]}
    return [t for pointer, t in tensors.items() if pointer not in parameters]


def check_unbiased(estimates: list[Tensor], exact: Tensor, tolerance: float) -> None:
    """The mean estimate's projection on the exact gradient is 1, and draws enough that a miss would show."""
    projections = torch.stack([(e * exact).sum() / exact.square().sum() for e in estimates])
    assert projections.std().item() / len(estimates) ** 0.5 < tolerance / 2, "too few draws for this tolerance"
    assert projections.mean().item() == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("ids", [None, range(8)], ids=["first epoch", "cached norms"])
def test_weight_gradients_are_unbiased_and_the_rest_exact(ids):
    model, x = attention(), tokens(1, 8, 320)
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs", ratio=0.3)
    estimates = []
    for _ in range(150):
        controller.set_sample_ids(ids)
        estimates.append(gradients(model, x))
    assert ("2 draws used cached" in str(controller.report())) == (ids is not None)
    for name, g in exact.items():
        if name.endswith("weight"):
            check_unbiased([e[name] for e in estimates], g, tolerance=0.01)
        else:
            torch.testing.assert_close(estimates[-1][name], g)


def test_an_estimate_is_the_sum_over_the_kept_rows():
    """One backward by hand, from what was saved: dW = sum_t scale_t dZ[row_t]^T H[row_t]."""
    layer, x = nn.Sequential(nn.Linear(16, 8)), tokens()
    controller = dsq.stash.apply(layer, "wtacrs")
    h_kK, index_2k = saved(layer, x)
    controller.remove()
    controller = dsq.stash.apply(layer, "wtacrs")  # the same seed again: the same draw
    out = layer(x)
    dz = torch.randn(out.shape)
    out.backward(dz)
    rows, scale = index_2k[0].long(), index_2k[1].view(torch.float32)
    torch.testing.assert_close(h_kK, x.reshape(-1, 16)[rows])
    torch.testing.assert_close(layer[0].weight.grad, (dz.reshape(-1, 8)[rows] * scale[:, None]).T @ h_kK)
    assert controller.report().saved_bytes == h_kK.nbytes + index_2k.nbytes


def test_the_cache_holds_the_root_mean_square_of_each_samples_gradient_and_rows_are_drawn_by_it():
    model = nn.Sequential(nn.Linear(16, 8))
    controller = dsq.stash.apply(model, "wtacrs")
    x, dz = torch.randn(4, 12, 16), torch.randn(4, 12, 8) * torch.tensor([10.0, 0.1, 0.1, 0.1]).view(4, 1, 1)
    controller.set_sample_ids(torch.tensor([7, 3, 900, 5]))
    model(x).backward(dz)
    state = controller.state_dict()
    assert state["ids"].tolist() == [7, 3, 900, 5]
    torch.testing.assert_close(state["norms"]["0"], dz.norm(dim=2).square().mean(1).sqrt())
    _, index_2k = saved(model, x)
    assert (index_2k[0] < 12).float().mean() > 0.8  # of the first sample, which has nearly all of the gradient


def test_readers_of_one_activation_share_rows_and_add_their_gradients():
    model, x = attention(), tokens()
    controller = dsq.stash.apply(model, "wtacrs")
    controller.set_sample_ids(range(8))
    projected, dz = {}, {}
    for name in "qkvo":
        getattr(model, name).register_forward_hook(lambda _m, _i, out, name=name: projected.update({name: out}))
    out = model(x)
    for name, z in projected.items():
        z.register_hook(lambda g, name=name: dz.update({name: g}))
    assert "2 draws, read by 4 linears" in str(controller.report())
    out.square().sum().backward()
    norms = controller.state_dict()["norms"]
    assert set(norms) == {"q", "o"}
    together = torch.cat([dz["q"], dz["k"], dz["v"]], dim=2)
    torch.testing.assert_close(norms["q"], together.norm(dim=2).square().mean(1).sqrt())


class Reading(Attention):
    """Layers that read activations as ``read(self, x)`` says."""

    def __init__(self, read: Callable[[Attention, Tensor], Tensor]) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, torch.relu(x) + 1)


def flattened_and_others_in_that_shape(net: Attention, x: Tensor) -> Tensor:
    return net.q(x).flatten(0, 1) + net.k(x.flatten(0, 1)) + net.v(x[:4].repeat(2, 1, 1)).flatten(0, 1)


def changed_in_place(net: Attention, x: Tensor) -> Tensor:
    q = net.q(x)
    x.mul_(2)
    return net.o(q + net.k(x))


def of_one_size_and_dead_at_once(net: Attention, x: Tensor) -> Tensor:  # each lies at the address of the one before
    for layer in (net.q, net.k, net.v) * 2:
        x = layer(x).sigmoid() * 2
    return x


def read_again_by_a_layer(net: Attention, x: Tensor) -> Tensor:  # which has rows of its own then
    return net.q(x) + net.k(x) + net.q(x)


READINGS = [
    (flattened_and_others_in_that_shape, 2, 3),
    (changed_in_place, 3, 3),
    (of_one_size_and_dead_at_once, 6, 6),
    (read_again_by_a_layer, 2, 3),
]


@pytest.mark.parametrize(("read", "draws", "linears"), READINGS)
def test_layers_share_the_rows_of_one_activation_alone(read, draws, linears):
    model = Reading(read)
    controller = dsq.stash.apply(model, "wtacrs")
    out = model(tokens())
    assert f"{draws} draws, read by {linears} linears" in str(controller.report())
    out.sum().backward()


def test_frozen_weights_no_grad_and_eval_keep_nothing():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), tokens()
    controller = dsq.stash.apply(model, "wtacrs")
    before = controller.state_dict()["generator"]
    with torch.no_grad():
        model.eval()(x)
    model.train().requires_grad_(False)
    assert saved(model, x.requires_grad_()) == []
    assert torch.equal(controller.state_dict()["generator"], before)
    model[1].bias.requires_grad_(True)
    model(x).sum().backward()
    assert model[1].bias.grad is not None
    assert model[1].weight.grad is None


def test_ids_that_do_not_fit_the_input_leave_the_sampling_to_h():
    model, x = attention(), tokens()
    controller = dsq.stash.apply(model, "wtacrs")
    for _ in range(2):
        controller.set_sample_ids(range(5))  # eight samples come
        gradients(model, x)
    assert "0 draws used cached" in str(controller.report())
    assert controller.state_dict()["norms"] == {}


def test_a_sample_that_is_unseen_or_whose_norm_was_not_finite_counts_as_the_mean_of_the_others():
    model = nn.Sequential(nn.Linear(16, 8))
    controller = dsq.stash.apply(model, "wtacrs")
    controller.set_sample_ids([0, 1, 3])
    dz = torch.tensor([1.0, 3.0, 1.0]).view(3, 1, 1).repeat(1, 12, 8)
    dz[2, 0, 0] = torch.inf
    model(torch.randn(3, 12, 16)).backward(dz)
    controller.set_sample_ids(np.array([1, 2]))
    unit = 8**0.5
    norms = controller.cache.lookup("0", torch.device("cpu"))
    torch.testing.assert_close(norms, torch.tensor([3 * unit, 3 * unit]))
    controller.set_sample_ids([0, 1, 2, 3])
    norms = controller.cache.lookup("0", torch.device("cpu"))
    torch.testing.assert_close(norms, torch.tensor([unit, 3 * unit, 2 * unit, 2 * unit]))


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
        tensors = saved(model, x)
        out = model(x)
    assert out.dtype == dtype
    assert [t.dtype for t in tensors if t.shape == (29, 16)] == [dtype] * 2
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


@pytest.mark.parametrize("order", [("wtacrs", "bfp"), ("bfp", "wtacrs")])
def test_another_policy_packs_the_rows_once_and_gives_the_gradient_of_their_draw(order):
    model, x = attention(), tokens(1, 8, 40)
    policy = dsq.stash.apply(model, "wtacrs")
    exact = gradients(model, x)
    rows = policy.report().saved_bytes
    policy.remove()
    for name in order:
        dsq.stash.apply(model, name, **({"bits": 4, "format": "bfp"} if name == "bfp" else {}))
    packed = gradients(model, x)  # of the same draw
    assert all(error(packed[name], exact[name]) < 0.15 for name in exact)
    report = dsq.stash.measure(lambda: model(x))
    linears = [h for h in report.tensors if "SampledLinear" in h.op]
    assert not [h for h in linears if h.dtype == "float32"]
    codes = sum(h.nbytes for h in linears if h.dtype == "uint8")
    index = sum(h.nbytes for h in linears if h.dtype == "int32")
    assert codes == (rows - index) * 4.5 / 32


def test_a_result_may_be_changed_in_place_as_fairseq_scales_queries():
    model, x = attention(), tokens()
    dsq.stash.apply(model, "wtacrs", ratio=0.5)
    q = model.q(x)
    q *= 0.25
    q.sum().backward()
    assert q.shape == (8, 12, 16)
    assert torch.allclose(model.q.bias.grad, torch.full((16,), 0.25 * 8 * 12))


# ---- rows and scales

T, IN, OUT = 96, 8, 6


def product(seed: int, spread: float) -> tuple[torch.Tensor, torch.Tensor]:
    """H (T, IN) and dZ (T, OUT) whose row norms are log-normal: the larger ``spread``, the fewer rows matter."""
    g = torch.Generator().manual_seed(seed)
    size_T = torch.exp(spread * torch.randn(T, 1, generator=g, dtype=torch.float64))
    h_TK = torch.randn(T, IN, generator=g, dtype=torch.float64) + 0.5
    dz_TN = torch.randn(T, OUT, generator=g, dtype=torch.float64) + 0.5
    return h_TK * size_T, dz_TN


def optimal(h_TK: torch.Tensor, dz_TN: torch.Tensor) -> torch.Tensor:
    return probabilities(h_TK.norm(dim=1), dz_TN.norm(dim=1))


@pytest.mark.parametrize("spread", [0.0, 0.5, 1.5, 3.0])
@pytest.mark.parametrize("k", [1, 29, 95])
def test_winners_minimize_the_bound_of_theorem_2(spread, k):
    p_T = optimal(*product(1, spread))
    rows_k, scale_k = sample_rows(p_T, k, torch.rand(k, dtype=torch.float64))
    p = np.sort(p_T.numpy())[::-1]
    bound = [(1 - p[:c].sum()) / (k - c) for c in range(k)]
    c = int(np.argmin(bound))
    assert rows_k[:c].tolist() == np.argsort(-p_T.numpy())[:c].tolist()
    assert (scale_k[:c] == 1).all()
    rest = set(np.argsort(-p_T.numpy())[c:].tolist())
    assert set(rows_k[c:].tolist()) <= rest
    # algorithm 2: (1 - sum_C p) / ((k - |C|) p_j)
    expected = [bound[c] / p_T[j].item() for j in rows_k[c:].tolist()]
    np.testing.assert_allclose(scale_k[c:].numpy(), expected, rtol=1e-6)


def test_rows_that_carry_everything_make_it_exact():
    h_TK, dz_TN = product(6, 0.0)
    h_TK[5:] = 0
    for k in (5, 6, 30):
        rows_k, scale_k = sample_rows(optimal(h_TK, dz_TN), k, torch.rand(k, dtype=torch.float64))
        torch.testing.assert_close(h_TK[rows_k].T @ (dz_TN[rows_k] * scale_k[:, None]), h_TK.T @ dz_TN)


def test_probabilities():
    h = torch.tensor([3.0, 1.0, 0.0])
    torch.testing.assert_close(probabilities(h), torch.tensor([0.75, 0.25, 0.0], dtype=torch.float64))
    torch.testing.assert_close(
        probabilities(h, torch.tensor([1.0, 3.0, 2.0])), torch.tensor([0.5, 0.5, 0.0], dtype=torch.float64)
    )
    p = probabilities(torch.ones(4), torch.tensor([0.0, 1.0, 1.0, 2.0]))
    assert (p[0] / p[1]).item() == pytest.approx(NORM_FLOOR)  # a cached norm of zero leaves a row its chance
    assert probabilities(torch.zeros(4)).tolist() == [0.25] * 4
    assert probabilities(torch.ones(4), torch.zeros(4)).tolist() == [0.25] * 4


def test_the_ends_of_the_uniform_interval_draw_the_ends_of_the_rest():
    p_T = torch.tensor([0.0, 0.19, 0.21, 0.29, 0.31], dtype=torch.float64)  # no winners
    ends = torch.tensor([0.0, 1 - 2.0**-53, 0.5], dtype=torch.float64)
    rows_k, _ = sample_rows(p_T, 3, ends)
    assert rows_k.tolist() == [1, 4, 3]  # never the row of probability zero
