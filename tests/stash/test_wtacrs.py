"""WTA-CRS as a policy: what is exact, what is unbiased, what is kept, and what a training loop may do to it."""

import copy
import gc
import io

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dsq.stash


class Attention(nn.Module):
    """q, k and v read one input; tanh makes it die with the forward."""

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
    """Tokens of very different sizes, as activations are."""
    g = torch.Generator().manual_seed(seed)
    lead = lead or (8, 12)
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
    """Tensors that reach a saved-tensor hook in a forward, parameters and repeated storages left out."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    seen: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in parameters:
            seen.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = model(x)
    del out
    return list(seen.values())


def check_unbiased(estimates: list[Tensor], exact: Tensor, tolerance: float) -> None:
    """The mean estimate's projection on the exact gradient is 1, and draws enough that a miss would show."""
    projections = torch.stack([(e * exact).sum() / exact.square().sum() for e in estimates])
    assert projections.std().item() / len(estimates) ** 0.5 < tolerance / 2, "too few draws for this tolerance"
    assert projections.mean().item() == pytest.approx(1, abs=tolerance)


@pytest.mark.parametrize("ids", [None, range(8)], ids=["first epoch", "cached norms"])
def test_weight_gradients_are_unbiased_and_the_rest_exact(ids):
    model, x = attention(), tokens(1, 8, 40)
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs", ratio=0.3)
    estimates = []
    for _ in range(1200):
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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
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
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 8))
    controller = dsq.stash.apply(model, "wtacrs", sample_dim=1)
    x, dz = torch.randn(12, 4, 16), torch.randn(12, 4, 8)  # (tokens, samples, features)
    controller.set_sample_ids(torch.tensor([7, 3, 900, 5]))
    model(x).backward(dz)
    state = controller.state_dict()
    assert state["ids"].tolist() == [7, 3, 900, 5]
    torch.testing.assert_close(state["norms"]["0"], dz.norm(dim=2).square().mean(0).sqrt())


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


def test_a_budget_of_all_tokens_is_exact_bit_for_bit():
    model, x = attention(), tokens()
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs", ratio=1.0)
    sampled = gradients(model, x)
    assert all(torch.equal(sampled[n], exact[n]) for n in exact)
    assert "4 linears kept whole" in str(controller.report())


def test_a_non_contiguous_input():
    model = attention()
    x = tokens(1, 12, 8).transpose(0, 1)
    dsq.stash.apply(model, "wtacrs", seed=3)
    viewed = gradients(model, x)
    model = attention()
    dsq.stash.apply(model, "wtacrs", seed=3)
    copied = gradients(model, x.contiguous())
    for name in copied:
        torch.testing.assert_close(viewed[name], copied[name])


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
    torch.manual_seed(0)
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
    model, x = nn.Sequential(nn.Linear(16, 8)), tokens()
    controller = dsq.stash.apply(model, "wtacrs")
    for _ in range(3):
        model(x)
    gc.collect()
    assert len(controller.sampler._shared) == 0


def test_batches_of_changing_shape():
    model = attention()
    controller = dsq.stash.apply(model, "wtacrs")
    for samples, length in [(8, 12), (3, 20), (8, 5), (1, 2)]:
        x = tokens(1, samples, length)
        controller.remove()
        exact = gradients(model, x)
        controller = dsq.stash.apply(model, "wtacrs")
        controller.set_sample_ids(range(samples))
        sampled = gradients(model, x)
        torch.testing.assert_close(sampled["input"], exact["input"])
        torch.testing.assert_close(sampled["o.bias"], exact["o.bias"])


def test_ids_that_do_not_fit_the_input_leave_the_sampling_to_h():
    model, x = attention(), tokens()
    controller = dsq.stash.apply(model, "wtacrs")
    for _ in range(2):
        controller.set_sample_ids(range(5))  # eight samples come
        gradients(model, x)
    assert "0 draws used cached" in str(controller.report())
    assert controller.state_dict()["norms"] == {}


def test_an_unseen_sample_counts_as_the_mean_of_the_others():
    torch.manual_seed(0)
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


def train(model: nn.Module, controller, steps: range) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        controller.set_sample_ids([step % 3 * 4 + i for i in range(4)])
        optimizer.zero_grad()
        model(tokens(step, 4, 12)).square().mean().backward()
        optimizer.step()


def test_a_resumed_run_equals_an_unbroken_one():
    whole = attention()
    train(whole, dsq.stash.apply(whole, "wtacrs", seed=1), range(8))

    first = attention()
    controller = dsq.stash.apply(first, "wtacrs", seed=1)
    train(first, controller, range(5))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "stash": controller.state_dict()}, file)
    file.seek(0)
    checkpointed = torch.load(file, weights_only=True)
    second = attention(9)
    second.load_state_dict(checkpointed["model"])
    controller = dsq.stash.apply(second, "wtacrs", seed=2)
    controller.load_state_dict(checkpointed["stash"])
    train(second, controller, range(5, 8))
    for name, p in whole.named_parameters():
        assert torch.equal(p, second.get_parameter(name)), name


def test_the_seed_decides_and_the_users_random_numbers_are_untouched():
    x = tokens()

    def draw(seed: int) -> Tensor:
        model = attention()
        dsq.stash.apply(model, "wtacrs", seed=seed)
        torch.manual_seed(11)
        g = gradients(model, x)["q.weight"]
        assert torch.rand(()).item() == reference
        return g

    torch.manual_seed(11)
    reference = torch.rand(()).item()
    assert torch.equal(draw(0), draw(0))
    assert not torch.equal(draw(0), draw(1))


@pytest.mark.parametrize("reentrant", [False, True])
def test_under_checkpointing_the_recomputed_rows_are_the_ones_used(reentrant):
    """Rows, numbers and scales of different draws would be a wrong gradient: its mean must be the true one."""

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = attention()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=reentrant)

    model, x = Checkpointed(), tokens()
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


def test_autocast_gradients_agree_with_full_precision():
    x = tokens()
    grads = []
    for enabled in (False, True):
        model = attention()
        dsq.stash.apply(model, "wtacrs", seed=4)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=enabled):
            out = model(x)
        out.float().sum().backward()
        grads.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.nn.functional.cosine_similarity(*grads, dim=0) > 0.99


@pytest.mark.parametrize("where", ["activation", "gradient"])
def test_an_overflow_reaches_the_weight_gradient(where):
    """Also one in a row that is not kept: a loss scaler must skip the step."""
    model, x = nn.Sequential(nn.Linear(16, 8, bias=False)), torch.randn(96, 16)
    dsq.stash.apply(model, "wtacrs", ratio=0.05)
    dz = torch.ones(96, 8)
    (x if where == "activation" else dz)[17, 3] = torch.inf
    model(x).backward(dz)
    assert not model[0].weight.grad.isfinite().all()


def test_a_non_finite_norm_is_not_cached():
    model = nn.Sequential(nn.Linear(16, 8))
    controller = dsq.stash.apply(model, "wtacrs")
    controller.set_sample_ids([0, 1])
    dz = torch.ones(2, 12, 8)
    dz[1, 0, 0] = torch.inf
    model(torch.randn(2, 12, 16)).backward(dz)
    assert controller.state_dict()["norms"]["0"].isfinite().tolist() == [True, False]


def test_tied_and_shared_modules_and_the_state_dict():
    torch.manual_seed(0)
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


def test_copies_and_pickles():
    model, x = attention(), tokens()
    dsq.stash.apply(model, "wtacrs")
    twin = copy.deepcopy(model)
    assert (29, 16) in {tuple(t.shape) for t in saved(twin, x)}
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    torch.testing.assert_close(loaded(x), model(x))
    assert (29, 16) not in {tuple(t.shape) for t in saved(loaded, x)}


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("form", ["self", "cross", "widths", "first", "unbatched"])
def test_multihead_attention(form, need_weights):
    torch.manual_seed(0)
    widths = {"kdim": 12, "vdim": 20} if form == "widths" else {}
    model = nn.MultiheadAttention(16, 4, batch_first=form == "first", **widths)
    shape = (lambda n, w: (n, w)) if form == "unbatched" else (lambda n, w: (5, n, w) if form == "first" else (n, 5, w))
    query = torch.randn(shape(14, 16))
    if form in ("self", "first", "unbatched"):
        key = value = query
        padding = torch.zeros(5, 14, dtype=torch.bool) if form != "unbatched" else torch.zeros(14, dtype=torch.bool)
    else:
        key = torch.randn(shape(11, widths.get("kdim", 16)))
        value = torch.randn(shape(11, widths["vdim"])) if widths else key
        padding = torch.zeros(5, 11, dtype=torch.bool)
    padding[..., -2:] = True
    causal = torch.full((14, key.shape[1 if form == "first" else 0]), -torch.inf).triu(1)

    def run() -> tuple[Tensor, Tensor | None, dict[str, Tensor]]:
        model.zero_grad()
        out, weights = model(query, key, value, key_padding_mask=padding, attn_mask=causal, need_weights=need_weights)
        out.square().sum().backward()
        return out, weights, {n: p.grad.clone() for n, p in model.named_parameters()}

    out, weights, exact = run()
    controller = dsq.stash.apply(model, "wtacrs", ratio=0.5)
    if form != "unbatched":
        controller.set_sample_ids(range(5))
    runs = [run() for _ in range(200)]
    sampled_out, sampled_weights, sampled = runs[-1]
    torch.testing.assert_close(sampled_out, out)
    assert (weights is None) == (sampled_weights is None)
    if weights is not None:
        torch.testing.assert_close(sampled_weights, weights)
    for name in exact:
        if name.endswith("weight"):
            check_unbiased([grads[name] for _, _, grads in runs], exact[name], tolerance=0.1)
        else:
            torch.testing.assert_close(sampled[name], exact[name])
    draws, readers = {"cross": (3, 3), "widths": (4, 4), "unbatched": (2, 4)}.get(form, (2, 2))
    assert f"{draws} draws, read by {readers} linears" in str(controller.report())
    assert (f"{draws} draws used cached" in str(controller.report())) == (form != "unbatched")


def test_a_transformer_encoder_layer():
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = tokens()
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs")
    assert set(controller.attached) == {"self_attn", "linear1", "linear2"}
    torch.testing.assert_close(gradients(model, x)["input"], exact["input"], rtol=1e-4, atol=1e-4)
    assert "4 draws, read by 4 linears" in str(controller.report())
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), model.train()(x))


def test_excluded_modules_and_subclasses_stay_as_they_are():
    class Mine(nn.Linear):
        pass

    model = nn.ModuleDict({"a": nn.Linear(4, 4), "head": nn.Linear(4, 4), "mine": Mine(4, 4)})
    assert dsq.stash.apply(model, "wtacrs", exclude="^head$").attached == ("a",)


@pytest.mark.parametrize(
    "options, error, words",
    [
        ({"ratio": 0}, ValueError, "ratio must be a number in"),
        ({"ratio": 1.5}, ValueError, "ratio must be a number in"),
        ({"ratio": "0.3"}, ValueError, "ratio must be a number in"),
        ({"ratio": float("nan")}, ValueError, "ratio must be a number in"),
        ({"products": 1}, TypeError, "products must be True or False"),
        ({"exclude": "("}, ValueError, "exclude must be a regular expression"),
        ({"exclude": ".*"}, ValueError, "no nn.Linear"),
        ({"sample_dim": "0"}, TypeError, "sample_dim must be an integer"),
        ({"seed": 1.5}, TypeError, "seed must be an integer"),
        ({"budget": 3}, TypeError, "no option 'budget'"),
    ],
)
def test_bad_options(options, error, words):
    with pytest.raises(error, match=words):
        dsq.stash.apply(attention(), "wtacrs", **options)


def test_bad_sample_ids_and_states():
    controller = dsq.stash.apply(attention(), "wtacrs")
    with pytest.raises(TypeError, match="ids must be integers"):
        controller.set_sample_ids(["a"])
    with pytest.raises(TypeError, match="ids must be integers"):
        controller.set_sample_ids(torch.ones(3))
    with pytest.raises(ValueError, match="one-dimensional"):
        controller.set_sample_ids(torch.ones(3, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="must have the keys"):
        controller.load_state_dict({"ids": torch.empty(0)})


class Products(nn.Module):
    """Attention of 4 heads in matmuls."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.dropout = nn.Linear(16, 48), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (4, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        p = (q @ k.transpose(-2, -1)).softmax(-1)
        return torch.matmul(self.dropout(p), v).transpose(1, 2).flatten(2)


def test_sampled_products_are_unbiased():
    torch.manual_seed(0)
    model, x = Products(), tokens(1, 4, 40)
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs", ratio=0.5, products=True)
    estimates = [gradients(model, x) for _ in range(600)]
    assert "3 operands of other products sampled" in str(controller.report())  # q, k and v; p is the softmax's
    check_unbiased([e["input"] for e in estimates], exact["input"], tolerance=0.02)
    check_unbiased([e["qkv.weight"] for e in estimates], exact["qkv.weight"], tolerance=0.03)
    assert not torch.equal(estimates[0]["input"], exact["input"])


def test_a_sampled_product_keeps_rows_of_one_and_columns_of_the_other():
    torch.manual_seed(0)
    model, x = Products(dropout=0.1), tokens(1, 4, 40)
    dsq.stash.apply(model, "wtacrs", ratio=0.25, products=True)
    kept = {tuple(t.shape) for t in saved(model, x)}
    # q (40 -> 10 tokens), k^T (40 -> 10), dropout's output (40 -> 10), v (4 -> 1 feature)
    assert {(4, 4, 10, 4), (4, 4, 10, 40), (4, 4, 1, 40)} <= kept
    assert not {(4, 4, 40, 4), (4, 4, 4, 40)} & kept


def test_products_inside_a_checkpoint_stay_exact():
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Products()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    model, x = Checkpointed(), tokens()
    exact = gradients(model, x)
    dsq.stash.apply(model, "wtacrs", products=True)
    torch.testing.assert_close(gradients(model, x)["input"], exact["input"])


def test_a_product_with_one_constant_operand_or_broadcast_stays_exact():
    class Mixing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ones(8, 12, 12) @ x @ self.weight.T

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.out = Mixing(16, 16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.mix(x))

    torch.manual_seed(0)
    model, x = Model(), tokens()
    exact = gradients(model, x)
    controller = dsq.stash.apply(model, "wtacrs", products=True)
    sampled = gradients(model, x)
    assert "0 operands of other products" in str(controller.report())
    torch.testing.assert_close(sampled["mix.weight"], exact["mix.weight"])


@pytest.mark.parametrize("order", [("wtacrs", "bfp"), ("bfp", "wtacrs")])
def test_another_policy_packs_the_rows_once(order):
    model, x = attention(), tokens(1, 8, 40)
    alone = dsq.stash.apply(model, "wtacrs", products=True)
    model(x)
    rows = alone.report().kept_bytes
    alone.remove()
    for name in order:
        dsq.stash.apply(model, name, **({"bits": 4} if name == "bfp" else {"products": True}))
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
