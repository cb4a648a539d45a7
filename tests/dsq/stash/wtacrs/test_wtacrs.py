"""WTA-CRS as a policy: what is exact, what is unbiased, what is kept."""

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dsq.stash
from tests.dsq.stash.wtacrs.sampled import Attention, attention, check_unbiased, gradients, saved, tokens


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
    assert controller.report().kept_bytes == h_kK.nbytes + index_2k.nbytes


def test_cached_norms_reduce_the_variance():
    """A batch where one sample has nearly all the gradient: knowing that must help."""
    layer, x = nn.Sequential(nn.Linear(16, 8)), torch.randn(8, 12, 16)
    dz = torch.randn(8, 12, 8) * torch.tensor([10.0] + [0.1] * 7).view(8, 1, 1)
    exact = (dz.reshape(-1, 8).T @ x.reshape(-1, 16)).norm()

    def error(ids) -> float:
        controller = dsq.stash.apply(layer, "wtacrs")
        total = 0.0
        for step in range(200):
            controller.set_sample_ids(ids)
            layer.zero_grad()
            layer(x).backward(dz)
            if step:  # the first epoch fills the cache
                total += (layer[0].weight.grad - dz.reshape(-1, 8).T @ x.reshape(-1, 16)).square().sum().item()
        controller.remove()
        return total / 199 / exact.item() ** 2

    assert error(range(8)) < 0.2 * error(None)


def test_the_cache_holds_the_root_mean_square_of_each_samples_gradient():
    model = nn.Sequential(nn.Linear(16, 8))
    controller = dsq.stash.apply(model, "wtacrs")
    x, dz = torch.randn(4, 12, 16), torch.randn(4, 12, 8)
    controller.set_sample_ids(torch.tensor([7, 3, 900, 5]))
    model(x).backward(dz)
    state = controller.state_dict()
    assert state["ids"].tolist() == [7, 3, 900, 5]
    torch.testing.assert_close(state["norms"]["0"], dz.norm(dim=2).square().mean(1).sqrt())


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


def test_flattened_tokens_are_the_same_activation():
    class Flattening(Attention):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.tanh(x)
            return self.q(x).flatten(0, 1) + self.k(x.flatten(0, 1)) + self.v(x[:4].repeat(2, 1, 1)).flatten(0, 1)

    torch.manual_seed(0)
    model = Flattening()
    controller = dsq.stash.apply(model, "wtacrs")
    model(tokens()).sum().backward()
    assert "2 draws, read by 3 linears" in str(controller.report())


def test_only_rows_and_their_numbers_are_kept():
    """relu(q * k + v) keeps q, k and its output, tanh its output; the linears add two samples of rows to that."""
    model, x = attention(), tokens()
    dsq.stash.apply(model, "wtacrs")
    kept = [tuple(t.shape) for t in saved(model, x.requires_grad_())]
    whole = [(8, 12, 16)] * 4  # tanh, q, k, relu
    assert sorted(kept) == sorted([*whole, (29, 16), (2, 29), (29, 16), (2, 29)])


@pytest.mark.parametrize("shape", [(96, 16), (8, 12, 16), (2, 4, 12, 16), (3, 16), (1, 16), (16,), (0, 12, 16)])
def test_any_leading_dimensions_and_few_tokens(shape):
    model = attention()
    x = torch.randn(shape)
    exact = gradients(model, x)
    dsq.stash.apply(model, "wtacrs", ratio=0.5)
    sampled = gradients(model, x)
    for name in exact:
        assert sampled[name].shape == exact[name].shape
        if "weight" not in name or x.numel() <= 16:
            torch.testing.assert_close(sampled[name], exact[name])


def test_a_layer_takes_its_input_by_the_name_it_had():
    layer, x = nn.Linear(4, 4), torch.randn(3, 4)
    dsq.stash.apply(layer, "wtacrs")
    assert torch.equal(layer(input=x), layer(x))


def test_a_budget_of_all_tokens_is_exact_bit_for_bit():
    model, x = attention(), tokens()
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs", ratio=1.0)
    sampled = gradients(model, x)
    assert all(torch.equal(sampled[n], exact[n]) for n in exact)
    assert "4 linears kept whole" in str(controller.report())


def test_frozen_weights_no_grad_and_eval_keep_nothing():
    model, x = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 8)), tokens()
    controller = dsq.stash.apply(model, "wtacrs")
    before = controller.state_dict()["generator"]
    with torch.no_grad():
        model.eval()(x)
    model.train().requires_grad_(False)
    model(x.requires_grad_()).sum().backward()
    assert x.grad is not None
    assert saved(model, x) == []
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


def test_an_unseen_sample_counts_as_the_mean_of_the_others():
    model = nn.Sequential(nn.Linear(16, 8))
    controller = dsq.stash.apply(model, "wtacrs")
    controller.set_sample_ids([0, 1])
    model(torch.randn(2, 12, 16)).backward(torch.cat([torch.ones(1, 12, 8), torch.full((1, 12, 8), 3.0)]))
    controller.set_sample_ids([1, 2])
    unit = 8**0.5
    norms = controller.sampler.cache.lookup("0", torch.device("cpu"))
    torch.testing.assert_close(norms, torch.tensor([3 * unit, 3 * unit]))
    controller.set_sample_ids([0, 1, 2])
    norms = controller.sampler.cache.lookup("0", torch.device("cpu"))
    torch.testing.assert_close(norms, torch.tensor([unit, 3 * unit, 2 * unit]))


def test_a_non_finite_norm_is_not_cached():
    model = nn.Sequential(nn.Linear(16, 8))
    controller = dsq.stash.apply(model, "wtacrs")
    controller.set_sample_ids([0, 1])
    dz = torch.ones(2, 12, 8)
    dz[1, 0, 0] = torch.inf
    model(torch.randn(2, 12, 16)).backward(dz)
    assert controller.state_dict()["norms"]["0"].isfinite().tolist() == [True, False]


def test_subclasses_stay_as_they_are():
    class Mine(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(4, 4), "mine": Mine(4, 4)})
    assert dsq.stash.apply(model, "wtacrs").attached == ("a",)


def test_sample_ids_of_numpy_and_torch_are_the_same_samples():
    controller = dsq.stash.apply(attention(), "wtacrs")
    for ids in (range(4), np.arange(4), torch.arange(4)):
        controller.set_sample_ids(ids)
    assert controller.state_dict()["ids"].tolist() == [0, 1, 2, 3]
