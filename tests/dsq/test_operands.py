"""Levels that name each operand: their grammar, their equations, what they save, and every way into the library."""

import pickle
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

import dsq
from dsq import recipes
from dsq.costmodel.model.methods import Setup
from dsq.functional import linear, matmul
from dsq.kernels.backend import parse_matmul
from dsq.kernels.product_dtype import product_dtype
from dsq.ops.hadamard import transform
from dsq.precision import Precision, parse_levels
from dsq.quantizers import Quantizers
from tests.dsq.gradients import saving

LONG = "[nvfp4 nvfp4_2d | nvfp4~ nvfp4_2d mxfp8 | nvfp4~@r16 nvfp4@r16]"


# ---- the grammar


def test_four_widths_stay_four_widths():
    (level,) = parse_levels("[8,4,8,6]")
    assert (str(level), list(level), level.as_json()) == ("[8,4,8,6]", [8, 4, 8, 6], [8, 4, 8, 6])
    assert str(level.operands) == "[8 8 | 8 5 6 | 6 4]"
    assert dsq.DSQConfig("[8,4,8,6]").at(0).operands is None


@pytest.mark.parametrize(
    ("text", "operands"),
    [
        ("[nvfp4/nvfp4_2d,mxfp8,nvfp4~,bf16]", "[nvfp4 nvfp4_2d | nvfp4~ mxfp8 | - mxfp8]"),
        ("[-,4,-,-]", "[- - | - - | - 4]"),
        ("[8/4,4/6,8,8/16]", "[8 4 | 8 6 16 | 8 4]"),
        ("[mxfp4,mxfp4@h,8,mxfp4@h]", "[mxfp4 mxfp4 | 8 mxfp4 mxfp4 | mxfp4@h32 mxfp4@h32]"),
        ("[4,mxfp4,mxfp4@r4096,8]", "[4 4 | mxfp4@r4096 mxfp4@r4096 8 | 8 mxfp4]"),
        ("[8,4~,8~,8]", "[8 8 | 8~ 5~ 8 | 8 4~]"),
        (LONG, LONG),
        ("mxfp6", "[mxfp6 mxfp6 | mxfp6 mxfp6 | mxfp6 mxfp6]"),
        ("bf16", "[- - | - - | - -]"),
        *(
            (name, f"[{name} {name} | {name} {name} | {name} {name}]")
            for name in ("bfp4", "mxfp4:rceil", "bfp:bits=4,block_size=32", "grid:1,0,6.0,1x32,e8m0,floor,0,0.5")
        ),
        ("nvfp4-nvidia", "[nvfp4 nvfp4_2d | nvfp4~ nvfp4_2d | nvfp4~@r16 nvfp4@r16]"),
    ],
)
def test_a_level_is_printed_as_it_was_written_and_says_each_operand(text, operands):
    level = Precision.parse(text)
    assert str(level) == text
    if text.startswith("["):
        for spaced in (text.replace("[", " [ "), text.replace(",", ", ").replace("|", "  |"), text.replace(",", " ")):
            assert Precision.parse(spaced) == level  # a run resumes with either
    if text.startswith("[") and "," in text:
        assert parse_levels([text.strip("[]"), text]) == (level, level)
    assert str(level.operands) == operands
    assert parse_levels(level.as_json()) == (level,)


@pytest.mark.parametrize(
    ("text", "levels"),
    [
        *((text, "[8,4,8,6]") for text in ("8 4 8 6", "8,4,8,6,", " [ 8 , 4,8 6 ]", "8,,4 8,6")),
        ("- 4 - -", "[-,4,-,-]"),
        ("- -", "- -"),
        ("8/4 4/6 8 8/16", "[8/4,4/6,8,8/16]"),
        ("8 8|8 5|8 4", "[8 8 | 8 5 | 8 4]"),
        ("bf16 4 4 8", "[bf16,4,4,8]"),
        ("fp16", "fp16"),
        ("mxfp4:rceil~@r16", "mxfp4:rceil~@r16"),
        ("bfp:bits=4,block_size=32~", "bfp:bits=4,block_size=32~"),
        ("[bfp:bits=4,4,4,8]", "[bfp:bits=4,4,4,8]"),
        ("[bfp:bits=4,block_size=32 4 | 4 4 | 4 4]", "[bfp:bits=4,block_size=32 4 | 4 4 | 4 4]"),
        ("[bfp:bits=4,block_size=32 4 4 8] bf16", "[bfp:bits=4,block_size=32,4,4,8] bf16"),
        ("grid:1,0,6.0,1x32,e8m0,floor,0,0.5 bf16", "grid:1,0,6.0,1x32,e8m0,floor,0,0.5 bf16"),
        *((f"[4,3,3,8]{between}[8,4,4,8]", "[4,3,3,8] [8,4,4,8]") for between in ("", " ", ", ", ";", " ,; ")),
        ("nvfp4-nvidia; bf16", "nvfp4-nvidia bf16"),
        ("[4,3,3,8],bf16", "[4,3,3,8] bf16"),
        ("[8 8 | 8 8 | 8 8] bf16", "[8 8 | 8 8 | 8 8] bf16"),
        ("hfp8 hfp8 bf16 bf16", "hfp8 hfp8 bf16 bf16"),
        ("mxfp4 mxfp4 [8,8,8,8] bf16", "mxfp4 mxfp4 [8,8,8,8] bf16"),
        ("mxfp4 mxfp4 mxfp4 mxfp4 bf16", "mxfp4 mxfp4 mxfp4 mxfp4 bf16"),
        ("mxfp4;mxfp8", "mxfp4 mxfp8"),
    ],
)
def test_spaces_commas_and_semicolons_separate(text, levels):
    schedule = parse_levels(text)
    assert " ".join(map(str, schedule)) == levels
    assert parse_levels(levels) == schedule


def test_no_operand_s_bits_may_fall():
    for names in ("nvfp4-nvidia bf16", "mxfp4 mxfp8", "mxfp4 mxfp6 mxfp8", "mxfp4 [8,8,8,8]"):
        assert " ".join(map(str, parse_levels(names))) == names
    assert len(parse_levels("mxfp4 mxfp4 mxfp8 bf16")) == 1  # the places of one level
    assert len(parse_levels("[mxfp4,4,4,8] [nvfp4,4,4,8]")) == 2  # as many bits in another format
    with pytest.raises(ValueError, match=r"never decrease, .* got \[- - \| 8 8 \| 8 8\] before \[8,8,8,8\]"):
        parse_levels("[- - | 8 8 | 8 8] [8,8,8,8]")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nvfp4-nvida", "recipe must be one of .* did you mean 'nvfp4-nvidia'"),
        ("nvfp4-nvida bf16", "recipe must be one of .* did you mean 'nvfp4-nvidia'"),
        ("mxfp4 mxpf6 mxfp8", "format must be one of .* got 'mxpf6'; did you mean 'mxfp6'"),
        ("bfq4", "format must be one of .* did you mean 'bfp4'"),
        ("mxfp4:rcel", "rule must be one of floor, ceil, even, rceil, got 'rcel'"),
        ("MXFP4", "format must be one of .* did you mean 'mxfp4'"),
        ("[8,NVFP4,8,8]", "format must be one of .* did you mean 'nvfp4'"),
        ("NVFP4-nvidia", "recipe must be one of .* did you mean 'nvfp4-nvidia'"),
        ("[mxfp4,mxpf4,4,4]", "did you mean 'mxfp4'"),
        ("[mxfp4 mxfp4 | mxfp4@h16 mxfp4 | - -]", "must have one transform, got mxfp4@h16 and mxfp4"),
        ("[mxfp4 mxfp4 | mxfp4@h16 mxfp4@r16 | - -]", "must have one transform, got mxfp4@h16 and mxfp4@r16"),
        ("[mxfp4 mxfp4 | 4 4 | mxfp4@h12 mxfp4@h12]", "takes 2, 4, 8"),
        ("[mxfp4 mxfp4 | 4 4 | mxfp4@h8192 mxfp4@h8192]", "takes 2, 4, 8"),
        ("[4/4/4,4,4,4]", "a place has one operand, or two"),
        ("[-~,4,4,4]", "takes no ~"),
        ("[mxfp4^ mxfp4 | 4 4 | 4 4]", "the backward's x and w alone"),
        ("[8,4,8,8^]", "the backward's x and w alone"),
        ("[8,4,8^,8]", "the backward's x and w alone"),
        ("[8 8 | 8 8 8@h16 | 8 8]", "takes no @, got 8@h16"),
        ("[4/99,4,4,4]", "bits of an operand must be a whole number in 2..32, got 99"),
        *(
            (text, rf"precision must be .*, got {re.escape(repr(text))}; formats by name are written as in mxfp8,")
            for text in (
                "[mxfp4 | mxfp4 | mxfp4]",
                "[8 8 | 8 8 | 8 8 8]",
                "mxfp4 8",
                "[bf16]",
                "8~",
                "8",
                "16,4,4",
                "[8;4;8;8]",
            )
        ),
        *(
            (text, rf"precision must be .*, got {re.escape(repr(text))}")
            for text in ("", "[]", "[2,2,2,16", "[8,4,8,8]]", "[[8,4,8,8]]", "nvfp4-nvidia [bf16", "[4,3,3,8] ]bf16")
        ),
        *(
            (text, 'got .* all\'; stash="all" packs all saved')
            for text in ("[8,4,8,8] all", "mxfp4 all", "8 4 8 8 all")
        ),
        *((f"[{word},4,8,8]", "an operand must be bits or a format, as in 8, ") for word in ("8.5", "-1", "+8", "8/")),
        ("[8, mxfp5, 8, 8]", "format must be one of .* got 'mxfp5'; did you mean"),
        ("auto [8,4,8,8]", "format must be one of .* got 'auto'"),
        ("[8,4,8,8] 8", "precision must be .*, got '8'"),
        ("[8,8 | 8 8 | 8/4 8]", "an operand must be bits or a format, .* got '8/4'"),
        ("nvfp4-nvidia 4 4 [8,8,8,8]", "got '4'"),
    ],
)
def test_errors_are_one_line(text, error):
    with pytest.raises(ValueError, match=error) as caught:
        parse_levels(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "operands"),
    [
        ({"format": "fixed"}, "[mxfp4 mxfp4 | fixed8 fixed4 | - fixed4]"),  # 32 bits of fixed are floating point
        ({"format": "bfp", "block_size": 32}, "[mxfp4 mxfp4 | {8} {4} {32} | {32} {4}]"),
    ],
)
def test_bits_beside_names_are_of_the_configs_family(options, operands):
    quantizers = dsq.DSQConfig("[mxfp4,4,8,32]", **options).at(0)
    assert str(quantizers.operands) == re.sub(r"{(\d+)}", r"bfp:bits=\1,block_size=32", operands)
    assert Quantizers.parse(quantizers.text) == quantizers


def test_without_quantization_the_stash_may_stay_and_seeds_are_drawn_as_before():
    quantizers = dsq.DSQConfig("[8 8 | 8~ 8 | 8@h16 mxfp4@h16]").at(0)
    for but_stash, operands in ((False, "[- - | - - | - -]"), (True, "[- - | - - | - mxfp4]")):
        plain = quantizers.unquantized(but_stash)
        assert (str(plain.operands), plain.draws) == (operands, True)
        assert Quantizers.parse(plain.text) == plain


# ---- the equations


def tensors(tokens=40):
    x, w, dy = torch.randn(tokens, 48), torch.randn(32, 48), torch.randn(tokens, 32)
    return x.requires_grad_(), w.requires_grad_(), dy


def passes(level, x, w, dy):
    y = linear(x, w, None, dsq.DSQConfig(level, format="bfp").at(0))
    return (y, *torch.autograd.grad(y, (x, w), dy))


def near(actual, expected):
    return torch.allclose(actual.double(), expected.double(), rtol=1e-4, atol=1e-3)


def test_each_operand_is_rounded_in_its_own_format_along_its_contraction():
    x, w, dy = tensors()
    y, dx, dw = passes("[mxfp8 nvfp4_2d | mxfp6 5 mxfp8 | mx9 nvfp4]", x, w, dy)

    def q(t, fmt, dim=-1):
        return dsq.quantize(t.detach(), fmt, dim).double()

    assert near(y, q(x, "mxfp8") @ q(w, "nvfp4_2d").t())
    assert near(dx, dsq.quantize((q(dy, "mxfp6") @ q(w, "bfp5", 0)).float(), "mxfp8"))
    assert near(dw, q(dy, "mx9", 0).t() @ q(x, "nvfp4", 0))


def test_a_caret_rounds_what_the_forward_rounded():
    x, w, dy = tensors()
    _, dx, dw = passes("[mxfp8 mxfp4 | - mxfp4^ | - mxfp4^]", x, w, dy)
    x, w = dsq.quantize(x, "mxfp8"), dsq.quantize(w, "mxfp4")
    assert near(dx, dy.double() @ dsq.quantize(w, "mxfp4", 0).double())
    assert near(dw, dy.double().t() @ dsq.quantize(x, "mxfp4", 0).double())


def test_a_transform_comes_before_the_rounding_of_both_operands():
    x, w, dy = tensors(70)
    _, dx, dw = passes("[- - | mxfp4@h16 mxfp4@h16 | mxfp4@h32 mxfp4@h32]", x, w, dy)

    def q(t, axis, size):
        return dsq.quantize(transform(t.detach(), axis, size, None), "mxfp4", axis).double()

    assert near(dx, q(dy, 1, 16) @ q(w, 0, 16))
    assert near(dw, q(dy, 0, 32).t() @ q(x, 0, 32))
    for exact in ("bfp16@h32", "bfp16@r32"):
        dw = passes(f"[- - | - - | {exact} {exact}]", x, w, dy)[2]
        assert near(dw, dy.double().t() @ x.double())


def test_transforms_of_any_length_are_orthogonal():
    for length in (0, 1, 7, 32, 45):
        for seed in (None, 3):
            h = transform(torch.eye(length, dtype=torch.float64), -1, 16, seed)
            assert torch.allclose(h @ h.t(), torch.eye(length, dtype=torch.float64))


def test_a_tilde_rounds_that_operand_alone_stochastically():
    x, w, dy = tensors()
    first, second = (passes("[mxfp4 mxfp4 | mxfp4~ mxfp4 | mxfp4 mxfp4]", x, w, dy) for _ in range(2))
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, True]
    level = "[- - | - - mxfp4~ | - -]"  # dx as it leaves the layer
    assert not torch.equal(passes(level, x, w, dy)[1], passes(level, x, w, dy)[1])
    for rounding, draws in (("nearest", False), ("stochastic", True)):  # the config's, of every operand
        quantizers = dsq.DSQConfig("[mxfp4 mxfp4 | mxfp4 mxfp4 mxfp4 | mxfp4 mxfp4]", rounding=rounding).at(0)
        assert quantizers.draws == draws
        assert all(product.rounds_alike for product in quantizers.linear_matmuls)  # a pass of them can be one call
    means = torch.stack([passes("[- - | mxfp4_aws~ - | - -]", x, w, dy)[1] for _ in range(300)]).mean(0)
    assert (means - dy @ w).norm() / (dy @ w).norm() < 0.02


class TwoOfOneInput(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(48, 32), nn.Linear(48, 32)

    def forward(self, x):
        return self.a(x) + self.b(x)


@pytest.mark.parametrize("stash", ["linears", "all"])
def test_random_signs_are_not_shared_by_layers_of_one_input(stash):
    x, dy = torch.randn(64, 48), torch.randn(64, 32)
    net = dsq.convert(TwoOfOneInput(), dsq.DSQConfig("[- - | - - | bfp16@r16 bfp16@r16]", stash=stash))
    gradients = torch.autograd.grad(net(x), (net.a.weight, net.b.weight), dy)
    assert all(near(dw, dy.t() @ x) for dw in gradients)


@pytest.mark.parametrize("stash", ["linears", "all"])
def test_a_caret_rounds_what_the_forward_of_its_own_layer_rounded(stash):
    x, dy = torch.randn(64, 48), torch.randn(64, 32)
    net, outputs = dsq.convert(TwoOfOneInput(), dsq.DSQConfig("[mxfp4~ - | - - | - mxfp8^]", stash=stash)), []
    for layer in (net.a, net.b):
        nn.init.eye_(layer.weight)
        nn.init.zeros_(layer.bias)
        layer.register_forward_hook(lambda _, args, y: outputs.append(y.detach()))
    gradients = torch.autograd.grad(net(x), (net.a.weight, net.b.weight), dy)
    for rounded, dw in zip(outputs, gradients, strict=True):
        assert near(dw[:, :32], dy.t() @ dsq.quantize(rounded, "mxfp8", 0))


def test_products_of_two_activations_take_the_same_level():
    a, b, dy = torch.randn(2, 24, 32), torch.randn(2, 32, 16), torch.randn(2, 24, 16)
    a, b = a.requires_grad_(), b.requires_grad_()
    y = matmul(a, b, dsq.DSQConfig("[mxfp8 mxfp4 | - mxfp6 | - nvfp4]").at(0))
    da, db = torch.autograd.grad(y, (a, b), dy)
    assert near(y, dsq.quantize(a, "mxfp8") @ dsq.quantize(b, "mxfp4", -2))
    assert near(da, dy @ dsq.quantize(b, "mxfp6").mT)
    assert near(db, dsq.quantize(a, "nvfp4", -2).mT @ dy)
    y = matmul(a, b, dsq.DSQConfig("[- - | - - | bfp16@h16 nvfp4@h16]").at(0))  # b in the stash's format for da
    assert near(torch.autograd.grad(y, a, dy)[0], dy @ dsq.quantize(b, "nvfp4").mT)


def test_under_bfloat16_a_grid_with_fractional_scales_is_multiplied_in_float32():
    x, w = (t.detach().bfloat16() for t in tensors()[:2])
    y = linear(x, w, None, "nvfp4")
    expected = (dsq.quantize(x.float(), "nvfp4").double() @ dsq.quantize(w.float(), "nvfp4").double().t()).bfloat16()
    assert y.dtype == torch.bfloat16
    assert (y == expected).float().mean() > 0.98  # else the order of sums decides


def test_a_layer_without_tokens_as_an_expert_may_be_has_zero_gradients():
    for recipe in recipes.names():
        x, w, dy = tensors(0)
        y, dx, dw = passes(recipe, x, w, dy)
        assert (y.shape, dx.shape, dw.abs().sum()) == (dy.shape, x.shape, 0)


@pytest.mark.parametrize("fmt", ["nvfp4", "fp8_row", "mxfp4@h32"])
def test_autocast_rounds_neither_quantized_nor_transformed_values(fmt):
    x, w, dy = tensors()
    level = f"[{fmt} {fmt} | - - | {fmt} {fmt}]"
    with torch.autocast("cpu", torch.bfloat16):
        y, batched = linear(x, w, None, level), matmul(x[None], w.t()[None], level)
    dw = torch.autograd.grad(y, w, dy.bfloat16())[0]
    expected, _, expected_dw = passes(level, x, w, dy.bfloat16().float())
    assert torch.allclose(dw, expected_dw, rtol=1e-5, atol=1e-5)
    for product in (y, batched[0]):
        assert (product == expected.bfloat16()).float().mean() > 0.98  # else the order of sums decides


# ---- products of the trainer's own, and a packed stash


@pytest.mark.parametrize("autocast", [False, True])
def test_a_stash_alone_is_packed_where_the_products_are_left_as_they_are(autocast):
    """y and dx have the bits of nn.Linear's own; dw reads x from codes."""
    plain = nn.Linear(48, 32)
    packed = dsq.convert(nn.Linear(48, 32), dsq.DSQConfig("[-,4,-,-]", stash="linears"))
    packed.load_state_dict(plain.state_dict())
    x, dy = torch.randn(5, 8, 48, requires_grad=True), torch.randn(5, 8, 32)
    results = []
    for layer in (plain, packed):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y, saved = saving(layer, x)
        results.append((y, *torch.autograd.grad(y, (x, *layer.parameters()), dy.to(y.dtype))))
    (y, dx, dw, db), (y1, dx1, dw1, db1) = results
    in_float32 = autocast and product_dtype(torch.bfloat16, "cpu") is torch.float32  # sums in another order
    for plain_value, value in ((y, y1), (dx, dx1), (db, db1)):
        assert (value - plain_value).norm() <= (2**-9 if in_float32 else 0) * plain_value.norm()
    assert 0.02 < (dw - dw1).norm() / dw.norm() < 0.15
    codes, scales, of_tensor = 40 * 48 / 2, 3 * 48, 1  # 40 tokens are three blocks
    assert sum(t.nbytes for t in saved if t.dtype == torch.uint8) == codes + scales + of_tensor


def test_a_model_trains_with_its_whole_stash_packed_beside_a_recipe():
    net = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64))
    x = torch.randn(128, 64)
    before = dsq.stash.measure(lambda: net(x)).nbytes
    dynamic = dsq.DynamicPrecision(net, "mxfp4-amd")
    assert dsq.stash.measure(lambda: net(x)).nbytes < 0.35 * before
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    losses = []
    for _ in range(30):
        loss = (net(x) - x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dynamic.record()
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


# ---- every way in


def test_every_recipe_is_a_level_of_its_own():
    for name in recipes.names():
        level = Precision.parse(name)
        assert str(level) == name
        quantizers = dsq.DSQConfig(name).at(0)
        parsed = Quantizers.parse(quantizers.text)
        assert parsed == quantizers
        texts = [matmul.text for matmul in quantizers.linear_matmuls]
        assert [parse_matmul(matmul.text).text for matmul in parsed.linear_matmuls] == texts
    with pytest.raises(ValueError, match="export the program again"):
        parse_matmul("bfp:bits=8,block_size=16/-1|bfp:bits=8,block_size=16/-1")


def test_the_text_of_quantizers_has_all_of_them():
    for quantizers in (dsq.DSQConfig("[8,4,8,8]").at(0), dsq.DSQConfig("mxfp4").at(0)):
        drawing = replace(quantizers, always_draws=True)
        assert Quantizers.parse(drawing.text) == drawing != quantizers


def test_a_config_of_a_recipe_goes_through_json_and_pickle():
    config = dsq.DSQConfig.of("nvfp4-nvidia bf16", rise_at=0.82)
    assert config.as_dict()["levels"] == ["nvfp4-nvidia", "bf16"]
    assert dsq.DSQConfig.from_dict(config.as_dict()) == config
    layer = dsq.convert(nn.Linear(32, 32), dsq.DSQConfig("nvfp4-nvidia bf16", stash="linears"))
    assert pickle.loads(pickle.dumps(layer)).quantizers == layer.quantizers
    dsq.set_level(layer, config, 1)
    x = torch.randn(4, 32)
    assert torch.equal(layer(x), nn.functional.linear(x, layer.weight, layer.bias))


def test_a_compiled_layer_has_the_eager_one_s_bits():
    layer = dsq.convert(
        nn.Linear(64, 32), dsq.DSQConfig("[mxfp8 nvfp4_2d | mxfp6 5 | mxfp4@h16 nvfp4@h16]", stash="linears")
    )
    x = torch.randn(16, 64, requires_grad=True)
    results = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        y = run(x)
        results.append((y, *torch.autograd.grad(y.square().sum(), (x, *layer.parameters()))))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("least, bits", [(0, 4), (5, 5), (16, 8)])
def test_min_weight_bits_reaches_levels_that_name_operands(least, bits):
    q = dsq.DSQConfig("[mxfp8,4,8~,8]", format="bfp", min_weight_bits=least).at(0)
    assert q.operands.w_for_dx.bits == bits
    setup = Setup(dsq.BFP(4), dsq.Precision.parse("[mxfp8,4,8~,8]"), min_weight_bits=least)
    assert setup.operands["w_for_dx"] == dsq.BFP(bits)
