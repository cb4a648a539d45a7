"""Experts and patches: at full width what they were; quantised, each product by the equations."""

import copy
import pickle
import warnings

import pytest
import torch
from torch import nn

import dsq

pytest.importorskip("transformers")
from transformers import GptOssConfig, MixtralConfig, MixtralForCausalLM, NemotronHConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts


def image(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.parametrize("shape", [(2, 3, 16, 24), (3, 17, 27)])
@pytest.mark.parametrize("bias", [False, True])
def test_at_full_width_it_is_the_convolution(shape, bias):
    torch.manual_seed(0)
    plain = nn.Conv2d(3, 20, (4, 6), stride=(4, 6), bias=bias)
    net = dsq.convert(copy.deepcopy(plain), dsq.DSQConfig(levels="[32,32,32,32]"))
    x, results = image(*shape), []
    for layer in (plain, net):
        y = layer(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))))
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert type(dsq.unconvert(net)) is nn.Conv2d


def test_quantised_it_is_the_linear_layer_of_its_patches():
    torch.manual_seed(0)
    net = dsq.convert(nn.Conv2d(3, 20, 4, stride=4), dsq.DSQConfig(levels="[4,4,4,16]"))
    x = image(2, 3, 16, 16)
    patches = nn.functional.unfold(x, 4, stride=4).mT  # (B, patches, values)
    y = dsq.functional.linear(patches, net.weight.flatten(1), net.bias, "[4,4,4,16]")
    assert torch.equal(net(x), y.mT.unflatten(2, (4, 4)))
    found, expected = (torch.autograd.grad(z.square().sum(), (x, net.weight)) for z in (net(x), y))
    assert all(map(torch.equal, found, expected))


def test_the_result_is_laid_out_as_that_of_the_convolution():
    net = nn.Conv2d(3, 4, 1)
    x = torch.randn(2, 3, 8, 8)
    for given in (x, x.to(memory_format=torch.channels_last), x[0]):
        strides = net(given).stride()
        dsq.convert(net)
        assert net(given).stride() == strides
        dsq.unconvert(net)


@pytest.mark.parametrize("shape", [(2, 3, 16, 2), (2, 5, 16, 16), (3, 2, 3, 16, 16)])
def test_what_the_convolution_refuses_is_refused(shape):
    net = dsq.convert(nn.Conv2d(3, 20, 4, stride=4))
    with pytest.raises(ValueError, match=r"input must be \(B, 3, at least 4, at least 4\)"):
        net(torch.randn(shape))


@pytest.mark.parametrize(
    "options", [{"stride": 2}, {"stride": 4, "padding": 1}, {"stride": 4, "dilation": 2}, {"stride": 4, "groups": 2}]
)
def test_others_stay(options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        net = dsq.convert(nn.Conv2d(4, 20, 4, **options))
    assert type(net) is nn.Conv2d


TOKENS, WIDTH, INNER, EXPERTS = 40, 32, 48, 4
Q0, Q1, Q2, Q3 = (dsq.BFP(bits) for bits in (5, 4, 3, 8))
CONFIG = dsq.DSQConfig(levels="[4,4,4,16]")


def experts(kind, config, **sizes):
    made = config(hidden_size=WIDTH, num_local_experts=EXPERTS, **sizes)
    made._experts_implementation = "grouped_mm"
    torch.manual_seed(0)
    net = kind(made)
    for p in net.parameters():
        torch.nn.init.normal_(p, std=0.2)
    return net


def mixtral():
    return experts(MixtralExperts, MixtralConfig, intermediate_size=INNER)


def gpt_oss():
    return experts(GptOssExperts, GptOssConfig, intermediate_size=INNER)


def nemotron():
    return experts(NemotronHExperts, NemotronHConfig, n_routed_experts=EXPERTS, moe_intermediate_size=INNER)


def batch():
    """Hidden states, and for each token two experts of the first three: the fourth is idle."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, generator=generator).requires_grad_()
    chosen = torch.rand(TOKENS, 3, generator=generator).argsort(1)[:, :2]
    return x, chosen, torch.rand(TOKENS, 2, generator=generator).requires_grad_()


def gradients(net, x, chosen, weights):
    y = net(x, chosen, weights)
    return [y, *torch.autograd.grad(y.square().sum(), (x, weights, *net.parameters()))]


@pytest.mark.parametrize("make", [mixtral, gpt_oss, nemotron])
def test_at_full_width_they_are_the_plain_ones(make):
    plain = make()
    net = dsq.convert(copy.deepcopy(plain), dsq.DSQConfig(levels="[32,32,32,32]"))
    assert list(dsq.converted(net)) == [""]
    for expected, found in zip(gradients(plain, *batch()), gradients(net, *batch()), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tokens_of_other_ranks_experts_give_nothing():
    net = dsq.convert(mixtral(), CONFIG)
    x, chosen, weights = batch()
    here = chosen.clone()
    here[:, 1] = EXPERTS
    one = net(x, chosen[:, :1], weights[:, :1])
    assert torch.equal(net(x, here, weights), one)


def test_the_last_products_are_kept_once():
    """The weights' gradient needs them; putting them back into the order of the tokens needs no values."""
    net, kept = dsq.convert(mixtral(), CONFIG), set()

    def note(x):
        if x.shape == (2 * TOKENS, WIDTH):
            kept.add(x.untyped_storage()._cdata)
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        y = net(*batch())
    assert y.requires_grad
    assert len(kept) == 1


@pytest.mark.filterwarnings("ignore:q3 is under 16")
def test_each_product_follows_the_equations():
    net, (x, chosen, weights) = dsq.convert(mixtral(), dsq.DSQConfig(levels="[5,4,3,8]", format="bfp")), batch()
    seen = []

    def watched(gate_up):
        gate_up.retain_grad()
        gate, up = gate_up.chunk(2, -1)
        inner = net.act_fn(gate) * up
        inner.retain_grad()
        seen.extend((gate_up, inner))
        return inner

    net._apply_gate = watched
    y = net(x, chosen, weights)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
    y.backward(dy)
    gate_up, inner = seen
    expected_y, dx = torch.zeros(TOKENS, WIDTH, dtype=torch.float64), torch.zeros(TOKENS, WIDTH, dtype=torch.float64)
    start = 0
    for e in range(EXPERTS):
        tokens, place = (chosen == e).nonzero(as_tuple=True)
        rows = slice(start, start := start + len(tokens))
        share = weights.detach()[tokens, place, None]
        for name, given, result, gradient in (
            ("gate_up_proj", x[tokens], gate_up[rows], gate_up.grad[rows]),
            ("down_proj", inner[rows], None, share * dy[tokens]),
        ):
            w, given = getattr(net, name)[e].detach(), given.detach()
            forward = on(given, Q0, 1) @ on(w, Q0, 1).T
            down = on((on(gradient, Q2, 1) @ on(w, Q1, 0)).float(), Q3, 1)
            close(getattr(net, name).grad[e], on(gradient, Q3, 0).T @ on(given, Q1, 0))
            if result is None:
                expected_y.index_add_(0, tokens, share.double() * forward)
                close(inner.grad[rows], down, slack=2.0**-5)
            else:
                close(result, forward)
                dx.index_add_(0, tokens, down)
    close(y, expected_y)
    close(x.grad, dx, slack=2.0**-5)
    assert not net.down_proj.grad[3].any()


def on(x, fmt, dim):
    """Values on the grid of the format, held against a statement of their own in the tests of the kernels."""
    return dsq.quantize(x, fmt, dim).double()


def close(found, expected, slack=0.0):
    """To float32's rounding; ``slack``: a tie may fall the other way in Q3."""
    if expected.numel():
        assert (found.double() - expected).abs().max() <= (1e-5 + slack) * expected.abs().max()


def test_each_experts_tokens_are_stashed_packed():
    net = dsq.convert(mixtral(), CONFIG)
    x, chosen, weights = batch()
    saved = {}

    def pack(t):
        saved[t.data_ptr()] = t
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        net(x, chosen, weights)
    tokens = chosen.flatten().bincount(minlength=EXPERTS).tolist()
    packed = sum(dsq.pack(torch.zeros(n, k), CONFIG.at(0).q1, dim=0).nbytes for n in tokens for k in (WIDTH, INNER))
    assert sum(t.nbytes for t in saved.values() if t.dtype == torch.uint8) == packed


def test_they_come_back_and_are_copied_and_pickled():
    net = dsq.convert(mixtral(), CONFIG)
    names = list(net.state_dict())
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert type(twin) is type(net)
        assert torch.equal(twin(*batch()), net(*batch()))
    assert type(dsq.unconvert(net)) is MixtralExperts
    assert list(net.state_dict()) == names == ["gate_up_proj", "down_proj"]


def test_compiled_in_one_graph_for_any_counts_of_tokens():
    """The counts are numbers of the graph where dynamo is told to take them so."""
    net, (x, chosen, weights) = dsq.convert(mixtral(), CONFIG), batch()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, error_on_recompile=True):
        compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
        for routes in (chosen.contiguous(), 3 - chosen):
            assert torch.equal(compiled(x, routes, weights), net(x, routes, weights))
    torch._dynamo.reset()


@pytest.mark.soak
def test_a_whole_model_whose_graphs_break_computes_with_the_whole_stash():
    """Code between its graphs calls the policy's mode by itself."""
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_local_experts": 2, "use_cache": False}
    config = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, **sizes)
    net = dsq.convert(MixtralForCausalLM(config), dsq.DSQConfig(stash="all"))
    torch._dynamo.reset()
    words = torch.randint(0, 64, (2, 48))
    assert torch.equal(torch.compile(net, backend="eager")(words).logits, net(words).logits)
