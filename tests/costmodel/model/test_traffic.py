"""First-principles traffic and arithmetic of operations small enough to count by hand."""

from dataclasses import replace

import pytest

from dsq.costmodel.model.ledger import FUSED
from dsq.costmodel.model.methods import AUTOCAST, BF16, Setup, parse_setups
from dsq.costmodel.model.operations import Gemm, Pointwise, Workload
from dsq.costmodel.model.traffic import KINDS, arithmetic_cost, mac_cost, matmuls, total_stash_bytes, transfers
from dsq.costmodel.paper.calibrated import dram
from dsq.costmodel.workloads.named import load_workload
from dsq.formats import BFP, FixedPoint, Identity
from dsq.precision import Precision
from tests.costmodel.workloads.models import quantizing_attention

PRECISION = Precision(8, 4, 6, 16)
SETUP = Setup(BFP(32), PRECISION)
FIXED = Setup(FixedPoint(32), PRECISION)


def of(*operations):
    return Workload("test", operations, tokens=1)


def by_tensor(workload, setup=SETUP, word=0):
    return {(t.tensor, t.phase, t.direction): t.bytes for t in transfers(workload, setup, word=word)}


def test_every_tensor_of_a_linear_layer():
    """32 tokens, 64 in, 48 out: containers of 2 bytes, a packed stash with an exponent byte for 16 values, fp32 weight
    gradient."""
    x, w, y = 32 * 64, 48 * 64, 32 * 48
    assert by_tensor(of(Gemm("l", 32, 64, 48, bias=True))) == {
        ("x", "forward", "read"): 2 * x,
        ("w", "forward", "read"): 2 * w,
        ("y", "forward", "write"): 2 * y,
        ("stash", "forward", "write"): x // 2 + x // 16,
        ("dy (for dx)", "backward", "read"): 2 * y,
        ("w (for dx)", "backward", "read"): 2 * w,
        ("dx", "backward", "write"): 2 * x,
        ("dy (for dw)", "backward", "read"): 2 * y,
        ("stash", "backward", "read"): x // 2 + x // 16,
        ("dw", "backward", "write"): 4 * w,
        ("bias", "forward", "read"): 4 * 48,
        ("d bias", "backward", "write"): 4 * 48,
    }


def test_a_converted_layer_lies_at_the_bits_of_its_operands():
    """Codes, and a byte for 16 values: x, w and y at q0 = 8, the stash at q1 = 4, w for dx at least 5, dy at q2 = 6 and
    q3 = 16, dx at q3. The weight's gradient and the bias stay in fp32, layers that are not converted in 16 bits."""
    layer = Gemm("l", 32, 64, 48, bias=True)
    x, w, y = 32 * 64, 48 * 64, 32 * 48
    assert by_tensor(of(layer), word=1) == {
        ("x", "forward", "read"): x + x // 16,
        ("w", "forward", "read"): w + w // 16,
        ("y", "forward", "write"): y + y // 16,
        ("stash", "forward", "write"): x // 2 + x // 16,
        ("dy (for dx)", "backward", "read"): y * 6 // 8 + y // 16,
        ("w (for dx)", "backward", "read"): w * 5 // 8 + w // 16,
        ("dx", "backward", "write"): 2 * x + x // 16,
        ("dy (for dw)", "backward", "read"): 2 * y + y // 16,
        ("stash", "backward", "read"): x // 2 + x // 16,
        ("dw", "backward", "write"): 4 * w,
        ("bias", "forward", "read"): 4 * 48,
        ("d bias", "backward", "write"): 4 * 48,
    }
    others = of(replace(layer, quantized=False), Pointwise("n", "norm", 32, 64), Pointwise("o", "adam", w, 1))
    assert by_tensor(others, word=1) == by_tensor(others)
    experts = of(replace(layer, weights=4, bias=False))
    for floats in (Setup(Identity(), Precision(16, 16, 16, 16)), AUTOCAST):
        for workload in (of(layer), experts):
            assert by_tensor(workload, floats, word=1) == by_tensor(workload, floats)


def test_products_of_activations_lie_at_the_bits_of_their_operands():
    """Both gradients read dy at q2, and are written at q3."""
    product = quantizing_attention(of(Gemm("scores", 32, 16, 48, batch=6, weight=False, quantized=False)))
    x, w, y = 6 * 32 * 16, 6 * 48 * 16, 6 * 32 * 48
    assert by_tensor(product, word=1) == {
        ("x", "forward", "read"): x + x // 16,
        ("w", "forward", "read"): w + w // 16,
        ("stash", "forward", "write"): x // 2 + x // 16,
        ("stash of w", "forward", "write"): w // 2 + w // 16,
        ("y", "forward", "write"): y + y // 16,
        ("stash", "backward", "read"): x // 2 + x // 16,
        ("stash of w", "backward", "read"): w // 2 + w // 16,
        ("dy (for dx)", "backward", "read"): y * 6 // 8 + y // 16,
        ("dy (for dw)", "backward", "read"): y * 6 // 8 + y // 16,
        ("dx", "backward", "write"): 2 * x + x // 16,
        ("dw", "backward", "write"): 2 * w + w // 16,
    }


def test_the_papers_tensors_move_what_the_paper_counts():
    """Its eight of each linear layer: 0.2016 of fixed-point 32 at [2,2,2,16]; w and dy are read at q1 and q2 for dx."""
    workload = load_workload("transformer_iwslt_de_en")
    layers = [of(replace(gemm, quantized=True, x_grad=True)) for gemm in workload.gemms if gemm.weight]
    # a float that is saved is its own stash, which the paper writes as well
    counted = dict.fromkeys(("x", "w", "y", "stash", "w (for dx)", "dy (for dx)", "dx"), 1) | {"x (for dw)": 2}
    setups = [parse_setups(text, {"min_weight_bits": 0})[0] for text in ("bfp:[2,2,2,16]", "fixed:[32,32,32,32]")]
    moved, whole = (
        sum(counted.get(key[0], 0) * size for layer in layers for key, size in by_tensor(layer, setup, 64).items())
        for setup in setups
    )
    assert moved / whole == pytest.approx(dram(workload, setups[0]), rel=1e-6)
    assert round(moved / whole, 4) == 0.2016


def test_traffic_by_the_kind_of_tensor():
    """The same layer, a norm before it, and the update: seven fp32 tensors and a 16-bit copy."""
    x, w, y, packed = 32 * 64, 48 * 64, 32 * 48, 32 * 64 // 2 + 32 * 64 // 16
    layer = of(
        Pointwise("n", "norm", 32, 64, parameters=2 * 64),
        Gemm("l", 32, 64, 48, bias=True),
        Pointwise("o", "adam", w, 1),
    )
    moved = dict.fromkeys(KINDS, 0)
    for transfer in transfers(layer, SETUP):
        moved[transfer.kind] += transfer.bytes
    scale, deviations = 4 * 2 * 64, 2 * 4 * 32
    assert moved == {
        "weights": 2 * 2 * w + 4 * 48 + 2 * scale,
        "activations written": 2 * x + deviations + 2 * y,
        "activations read": 2 * 2 * x + deviations + 2 * x,
        "stash written": packed,
        "stash read": packed,
        "gradients": 2 * x + 2 * x + scale + 2 * 2 * y + 2 * x + 4 * w + 4 * 48,
        "optimizer": w * (4 * (2 + 1 + 4) + 2),
        "quantizing": 0,  # no matter of the workload, but of the hardware
        "again": 0,
    }


def test_neither_floats_nor_layers_that_are_not_converted_pay_for_a_second_copy_of_x():
    float_16 = Setup(Identity(), Precision(16, 16, 16, 16))
    sizes = by_tensor(of(Gemm("l", 32, 64, 48)), float_16)
    assert ("stash", "forward", "write") not in sizes
    assert sizes["x (for dw)", "backward", "read"] == 2 * 32 * 64
    plain = of(Gemm("l", 32, 64, 48, quantized=False))
    assert sizes == by_tensor(plain, float_16) == by_tensor(plain)
    assert total_stash_bytes(plain, SETUP) == 0


def test_a_frozen_layer_leaves_the_stash_to_those_that_share_its_input():
    shared = of(*(Gemm(name, 32, 64, 48, input="h") for name in "qkv"))
    one = total_stash_bytes(shared, SETUP)
    assert [total_stash_bytes(shared.freezing(names), SETUP) for names in ("q", "q|k", "v")] == [one] * 3
    written = sum(
        t.bytes for t in transfers(shared.freezing("q"), SETUP) if t.tensor == "stash" and t.direction == "write"
    )
    assert written == one


def test_floats_stash_what_they_keep():
    """x itself, at the container's width: no codes of q1 are made, nor of more than 16 bits."""
    layer = of(Gemm("l", 32, 64, 48))
    for level in ("[32,32,32,32]", "[8,32,8,8]"):
        sizes = by_tensor(layer, Setup(BFP(32), Precision.parse(level)))
        assert {tensor for tensor, *_ in sizes} & {"stash", "x (for dw)"} == {"x (for dw)"}
        assert sizes["x (for dw)", "backward", "read"] == 4 * 32 * 64
    for precision, container, size in (
        (Precision(16, 4, 4, 16), 0, 2),
        (Precision(32, 16, 16, 16), 0, 4),
        (PRECISION, 32, 4),
    ):
        setup = Setup(Identity(), precision, container=container)
        assert total_stash_bytes(layer, setup) == by_tensor(layer, setup)["x (for dw)", "backward", "read"]
        assert total_stash_bytes(layer, setup) == size * 32 * 64


def test_attention_products_quantized_or_not():
    product = Gemm("scores", 10, 16, 12, batch=6, weight=False, quantized=False)
    plain = by_tensor(of(product))
    assert plain["x", "forward", "read"] == 6 * 10 * 16 * 2
    assert plain["dw", "backward", "write"] == 6 * 12 * 16 * 2
    quantized = by_tensor(quantizing_attention(of(product)))
    assert quantized["x", "forward", "read"] == 6 * 10 * 16 * 2
    assert quantized["stash of w", "forward", "write"] == 6 * (12 * 16 // 2 + 16)  # blocks along the 12 keys


#: bytes that a pass over 10 x 20 values moves, forward and backward
PASSES = {
    "softmax": 200 * (5 * 2 + 2 * 4),  # its result in fp32 too, written and read
    "residual": 200 * 6 * 2,
    "gate": 200 * 11 * 2,
    "scale": 200 * 4 * 2,
    "dropout": 200 * (4 * 2 + 2),  # a mask of a byte a value
    "norm": 200 * 5 * 2 + 2 * 2 * 10 * 4,  # two statistics a row, in fp32
    "loss": 200 * 4 * 2,
    "loss of fp32": 200 * (2 * 2 + 2 * 4),
}


@pytest.mark.parametrize("kind", PASSES)
def test_pointwise_passes(kind):
    assert sum(by_tensor(of(Pointwise("p", kind, 10, 20))).values()) == PASSES[kind]


def test_arithmetic_counts_each_product_at_its_widths():
    workload = of(Gemm("l", 3, 5, 7))
    products = matmuls(workload, FIXED)
    assert [(p.name, p.op.macs, p.first.bits, p.second.bits) for p in products] == [
        ("forward", 105, 8, 8),
        ("dx", 105, 6, 5),
        ("dw", 105, 16, 4),
    ]
    assert [p.second.bits for p in matmuls(workload, replace(FIXED, min_weight_bits=0))] == [8, 4, 4]
    assert arithmetic_cost(products) == pytest.approx(105 * (64 + 30 + 64) / 1024)
    assert arithmetic_cost(matmuls(workload, SETUP)) == pytest.approx(
        105 * sum(mac_cost(BFP(a), BFP(b)) for a, b in ((8, 8), (6, 5), (16, 4)))
    )
    assert [p.name for p in matmuls(of(Gemm("l", 3, 5, 7, x_grad=False)), SETUP)] == ["forward", "dw"]


def test_both_gradients_of_a_product_of_activations_take_q2():
    """dsq.ops.products: da = Q2(dy) Q1(b)^T, db = Q1(a)^T Q2(dy)."""
    products = matmuls(of(Gemm("scores", 3, 5, 7, weight=False)), FIXED)
    assert [(p.name, p.first.bits, p.second.bits) for p in products] == [("forward", 8, 8), ("dx", 6, 4), ("dw", 6, 4)]


def test_unquantized_products_multiply_significands():
    products = matmuls(of(Gemm("l", 1, 1, 1, quantized=False)), SETUP)
    assert [product.first.multiplier_bits for product in products] == 3 * [8]


def test_a_setup_lays_blocks_along_the_axis_that_is_summed_over():
    assert total_stash_bytes(of(Gemm("l", 16, 1, 1)), SETUP) == 16 + 1  # a bitstream a row, one exponent


def test_a_level_that_names_formats_is_costed_operand_by_operand():
    gemm = Gemm("layer", 128, 64, 32)
    setup = Setup(BFP(32), Precision.parse("[mxfp4 8 | - mxfp8 | nvfp4~ mxfp6]"))
    results = {it.name: (str(it.first), str(it.second)) for it in matmuls(of(gemm), setup)}
    assert results == {
        "forward": ("mxfp4", "bfp:bits=8,block_size=16"),
        "dx": ("float:bits=16", "mxfp8_e4m3"),
        "dw": ("nvfp4", "mxfp6_e2m3"),
    }
    assert total_stash_bytes(of(gemm), setup) == 128 * 64 * 6.25 / 8


@pytest.mark.parametrize(
    ("kinds", "fused"),
    [
        (("norm", "residual"), 8),  # x, f, y, norm; dy, d norm, x, dx
        (("dropout",), 1),  # df
        (("scale",), 0),
        (("softmax",), 5),  # x, y; y, dy, dx
        (("adapter",), 5),  # y, B A x, their sum; dy, d B A x
    ],
)
def test_passes_of_a_fused_chain_move_what_their_neighbors_do_not(kinds, fused):
    """Tensors of both passes that are moved beside those that stay on chip, by hand; in 16 bits."""
    ops = tuple(Pointwise(kind, kind, 64, 32, upcasts=True) for kind in kinds)
    moved = [one for one in transfers(Workload("one", ops, tokens=64), BF16) if one.values % (64 * 32) == 0]
    share = 2 * fused * 64 * 32 / sum(one.bytes for one in moved)
    assert [FUSED[kind] for kind in kinds] == pytest.approx([share] * len(kinds), abs=0.01)
