"""bfp: gradients from tensors quantized as dsq.quantize does, bytes by arithmetic, exact masks, shared codes."""

import pytest
import torch
from torch import nn

import dsq
from analysis.models import encoder
from dsq.formats import SignedNVInt
from dsq.stash import apply, measure
from tests.dsq.gradients import error, gradient
from tests.dsq.stash.census import saved_bytes

ROWS, WIDTH = 32, 48
BLOCK_FORMATS = {"bfp": dsq.BFP, "snvint": SignedNVInt}
ACTIVATION = 2  # bits more of what an activation keeps


def quantized(x, fmt):
    """Neighbors in memory share a scale."""
    return dsq.quantize(x.detach().reshape(-1), fmt).view(x.shape)


def packed_bytes(numel, bits=4, format="snvint"):
    """Codes, a byte a block, and snvint's byte a tensor; above 6 bits it is bfp."""
    return -(-numel * bits // 8) + -(-numel // 16) + (format == "snvint" and bits <= 6)


def stash(model, x):
    """Bytes kept; the meter and the census of live storages must agree (numbers become tensors out of its sight)."""
    report = measure(lambda: model(x).sum())
    assert sum(held.nbytes for held in report.tensors if held.shape) == saved_bytes(lambda: model(x).sum())
    return report.nbytes


@pytest.mark.parametrize(("rows", "width"), [(ROWS, WIDTH), (13, 21)])
@pytest.mark.parametrize("options", [{}, {"block_size": 5}, *({"format": name} for name in BLOCK_FORMATS)])
def test_linear_gradient_is_that_of_the_quantized_input(options, rows, width):
    model, x = nn.Sequential(nn.Linear(width, 8)), torch.randn(rows, width)
    apply(model, "bfp", bits=3, **options)
    y = model(x)
    grad = torch.randn_like(y)
    y.backward(grad)
    fmt = BLOCK_FORMATS[options.get("format", "snvint")](3, block_size=options.get("block_size", 16))
    assert torch.equal(model[0].weight.grad, grad.t() @ quantized(x, fmt))
    assert torch.equal(model[0].bias.grad, grad.sum(0))
    model.requires_grad_(False)  # as below LoRA's adapters: nobody reads the input again
    assert measure(lambda: model(x.clone().requires_grad_()).sum()).nbytes == 0


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("bits", [2, 3, 4, 8, 16])
def test_bytes(bits, format):
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    controller = apply(model, "bfp", bits=bits, format=format)
    expected = sum(packed_bytes(ROWS * WIDTH, min(width, 16), format) for width in (bits, bits + ACTIVATION))
    assert stash(model, torch.randn(ROWS, WIDTH)) == expected
    summary = controller.report()
    assert (summary.raw_bytes, summary.saved_bytes) == (2 * 4 * ROWS * WIDTH, expected)


def test_above_16_bits_tensors_stay():
    layers = nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.Tanh()
    model, x = nn.Sequential(*layers), torch.randn(ROWS, WIDTH)
    exact = gradient(model, x)
    apply(model, "bfp", bits=32)
    assert torch.equal(gradient(model, x), exact)


class Two(nn.Module):
    """Two layers that read one activation, each in its own view of it."""

    def __init__(self, first, last):
        super().__init__()
        self.views = first, last
        widths = [view(torch.zeros(16, 24, 32)).shape[-1] for view in self.views]
        self.layers = nn.ModuleList(nn.Linear(width, 32) for width in widths)

    def forward(self, x):
        x = x + 0  # an activation, which nobody keeps yet
        return torch.cat([layer(view(x)).flatten() for layer, view in zip(self.layers, self.views, strict=True)])


PLAIN, TURNED, WIDER = lambda x: x, lambda x: x.transpose(0, 1), lambda x: x.reshape(16, 12, 64)


@pytest.mark.parametrize("views", [(PLAIN, PLAIN), (PLAIN, TURNED), (TURNED, PLAIN), (PLAIN, WIDER), (WIDER, PLAIN)])
def test_quantized_layers_that_read_one_memory_in_other_shapes_or_orders_have_their_own_codes(views):
    model, x = Two(*views), torch.randn(16, 24, 32)
    exact = gradient(model, x)
    dsq.convert(model, dsq.DSQConfig("[16,8,16,16]", stash="all"))
    assert error(gradient(model, x), exact) < 0.02


@pytest.mark.parametrize("level", ["mxfp4", "[-,mxfp8,-,-]", "[8 8 | 8 8 | 8 4]", "[8,4,8,8]"])
def test_dw_reads_x_in_the_format_that_a_level_names(level):
    """Not an x that is recomputed from what GELU saves, except at bits."""
    x, gradients = torch.randn(ROWS, WIDTH, requires_grad=True), {}
    for stash in ("linears", "all"):
        torch.manual_seed(0)
        model = dsq.convert(nn.Sequential(nn.GELU(), nn.Linear(WIDTH, WIDTH)), dsq.DSQConfig(level, stash=stash))
        model(x).sum().backward()
        gradients[stash] = model[1].weight.grad
    assert torch.equal(*gradients.values()) == (level != "[8,4,8,8]")


def test_encoder_is_close_to_its_smallest_possible_size():
    """All values of the plain stash at 4.5 bits are more than it keeps: much is made again."""
    model, x = encoder(blocks=2, width=128, heads=4, ffn=512), torch.randn(4, 64, 128)
    plain = measure(lambda: model(x).sum()).nbytes + x.nbytes  # the batch is kept as it is, and was there before
    apply(model, "bfp", bits=4)
    assert stash(model, x) <= plain * 4.5 / 32


def test_follows_the_level_of_a_converted_model_and_leaves_its_codes_alone():
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(ROWS, WIDTH)
    config = dsq.DSQConfig(levels=("[2,2,2,16]", "[16,4,4,16]", "[16,6,4,16]"), stash="linears")
    dsq.convert(model, config)
    apply(model, "bfp")
    for level, bits in enumerate((2, 4, 6)):
        dsq.set_level(model, config, level)
        blocks_along_tokens = ROWS * WIDTH * bits // 8 + ROWS // 16 * WIDTH + 1  # snvint's byte
        assert stash(model, x) == packed_bytes(ROWS * WIDTH, max(4, bits) + ACTIVATION) + blocks_along_tokens


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, dsq.BFP(4, block_size=8)),
        ({"bits": 9}, dsq.BFP(9, block_size=8)),
        ({"bits": 5, "block_size": 32}, dsq.BFP(5, block_size=32)),
        ({"format": "snvint"}, SignedNVInt(4)),
        ({"bits": 2, "format": "snvint", "block_size": 32}, SignedNVInt(2, block_size=32)),
        ({"bits": 9, "format": "snvint", "block_size": 32}, dsq.BFP(9, block_size=32)),
        ({"format": "fixed"}, dsq.FixedPoint(4)),
    ],
)
def test_a_converted_model_is_packed_as_its_layers_unless_told(options, expected):
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(ROWS, WIDTH)
    dsq.convert(model, dsq.DSQConfig(levels="[2,2,2,16]", format="bfp", block_size=8, stash="linears"))
    controller = apply(model, "bfp", **options)
    model(x).sum().backward()
    assert f"format {expected}" in str(controller.report())
    dy = 1 - quantized(model[0](x), expected.at(expected.bits + ACTIVATION)).tanh().square()
    torch.testing.assert_close(model[0].bias.grad, dy.sum(0))
