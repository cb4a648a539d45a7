"""A step on a GPU launches few kernels and never waits. They are counted on the meta device, which has no values."""

from contextlib import suppress
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import dsq
from analysis.models import attach
from dsq.formats import BFP, Layout, SignedNVInt

pytest.importorskip("triton", reason="the GPU backend needs triton, which is not installed")
launches = pytest.importorskip("analysis.gpu.launches")
META = launches.META
LEVELS = "[8,4,4,8]"


class Net(nn.Module):
    """A pre-LN block with dropout, and behind it layers that save masks."""

    def __init__(self):
        super().__init__()
        self.block = launches.EncoderBlock(64, 2, 128, dropout=0.1, sdpa=True)
        self.out = nn.Linear(64, 64)

    def forward(self, x_BTD):
        return F.relu(self.out(F.dropout(self.block(x_BTD), 0.1)))


SETUPS = [LEVELS, *(f"{LEVELS} all{option}" for option in ("", " stochastic", " attention")), "snvint 4", "mesa"]
SETUPS += ["gact 4 uniform", "selective", "wtacrs 0.3", "checkpoint block"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("setup", SETUPS)
def test_a_warm_step_never_waits(setup):
    model = Net().to(META)
    attach(model, setup)
    step = launches.step(model, (4, 32, 64))
    assert step.waits == []
    assert len(step.launches) > 60


def test_attention_is_one_launch_a_pass_and_one_that_recomputes_its_result():
    step = launches.step(launches.block(64, LEVELS), (4, 32, 64))
    names = [launch.name for launch in step.launches]
    assert [name for name in names if "attention" in name] == ["attention"] * 2 + ["attention_backward"]
    assert "bmm" not in names


@pytest.mark.parametrize(
    "waiting",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x.cpu(),
        lambda x: x.add(torch.ones(2, 2).to(META)),
    ],
)
def test_an_operation_that_waits_is_counted(waiting):
    x = torch.empty(2, 2, device=META)
    # the meta device has no values to give
    with launches.counted() as counted, suppress(NotImplementedError, RuntimeError):
        waiting(x)
    assert len(counted.waits) == 1


@pytest.mark.parametrize(("bias", "max_launches"), [(True, 13), (False, 11)])
def test_a_linear_layer_launches_few_kernels(bias, max_launches):
    layer = dsq.Linear(256, 256, bias, LEVELS, META)
    step = launches.step(layer, (512, 256))
    assert len(step.launches) <= max_launches
    assert [launch.name for launch in step.launches].count(
        "encode"
    ) == 5  # x and dy are each read once for two roundings


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("fmt", [BFP(8), BFP(4), SignedNVInt(4)], ids=str)
def test_pack_unpack_and_quantize_move_few_bytes(fmt, dim):
    x = torch.empty(512, 256, dtype=torch.bfloat16, device=META)
    layout = Layout.of(x.shape, dim)
    shapes = layout.code_shape(fmt.bits), fmt.scale_shape(layout)
    codes, scales = (torch.empty(shape, dtype=torch.uint8, device=META) for shape in shapes)
    for call, other_bytes in (
        (partial(launches.TRITON.quantize, x, fmt, layout, None, torch.bfloat16), x.nbytes),
        (partial(launches.TRITON.pack, x, fmt, layout, None), fmt.nbytes(layout)),
        (partial(launches.TRITON.unpack, codes, scales, fmt, layout, x.dtype), fmt.nbytes(layout)),
    ):
        with launches.counted() as counted:
            call()
        read_twice = fmt.name == "snvint" and call.func.__name__ != "unpack"  # its exponent depends on every value
        assert len(counted.launches) == 1 + read_twice
        moved = sum(launch.moved for launch in counted.launches)
        assert moved <= (1.8 if read_twice else 1.01) * (x.nbytes + other_bytes)
