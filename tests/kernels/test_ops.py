"""The registered operators: what torch.compile, modes and autograd see, and the way past the dispatcher."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from dsq.kernels import REFERENCE, Grid, use_backend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dsq import kernels

GRID = Grid(4, 16)
ROOT = Path(__file__).parents[2]
ops = torch.ops.dsq


@pytest.mark.parametrize("grid", [Grid(4, 16), Grid(7, 0), Grid(3, 0, 1)])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("seed", [None, 3])
def test_opcheck(grid, dim, seed):
    x, numbers = torch.randn(20, 33), (grid.bits, grid.box, grid.exponent)
    codes, exponents = ops.pack(x, *numbers, dim, seed)
    torch.library.opcheck(ops.quantize, (x, *numbers, dim, seed, torch.bfloat16))
    torch.library.opcheck(ops.pack, (x, *numbers, dim, seed))
    torch.library.opcheck(ops.unpack, (codes, exponents, *numbers, [20, 33], dim, torch.float32))


def round_trip(x, dim=0):
    codes, exponents = kernels.pack(x, GRID, dim)
    return kernels.unpack(codes, exponents, GRID, tuple(x.shape), dim, x.dtype) + kernels.quantize(x, GRID, dim)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_in_one_graph_to_the_same_values(dynamic):
    compiled = torch.compile(round_trip, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (16, 40):
        x = torch.randn(rows, 24)
        assert torch.equal(compiled(x), round_trip(x))


class Seen(TorchDispatchMode):
    def __init__(self):
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_the_operators():
    with Seen() as seen:
        round_trip(torch.randn(16, 32))
    assert {"dsq::pack", "dsq::unpack", "dsq::quantize"} <= set(seen.names)


def test_fake_tensors_stay_fake():
    with FakeTensorMode():
        y = round_trip(torch.empty(10, 20, dtype=torch.bfloat16))
    assert (y.shape, y.dtype) == ((10, 20), torch.bfloat16)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_under_vmap_boxes_stay_within_a_sample():
    x = torch.randn(3, 24, 8)
    y = torch.vmap(lambda sample: kernels.quantize(sample, GRID, 0))(x)
    assert torch.equal(y, torch.stack([kernels.quantize(sample, GRID, 0) for sample in x]))


@pytest.mark.parametrize("shape", [(), (1,), (0, 16), (16, 0), (2, 3, 5)])
def test_the_direct_way_gives_what_the_operator_gives(shape):
    x = torch.randn(shape)
    direct = kernels.quantize(x, GRID, -1)
    codes, exponents = kernels.pack(x, GRID, -1)
    back = kernels.unpack(codes, exponents, GRID, shape, -1, torch.float32)
    assert torch.equal(direct, ops.quantize(x, 4, 16, None, -1, None, torch.float32))
    assert torch.equal(codes, ops.pack(x, 4, 16, None, -1, None)[0])
    assert direct.shape == back.shape == x.shape
    assert torch.equal(back, direct)


@pytest.mark.parametrize(
    "x", [torch.randn(32, 8).t(), torch._neg_view(torch.randn(8, 32)), torch._efficientzerotensor(8, 32)]
)
def test_tensors_whose_memory_is_not_their_values(x):
    plain = torch.empty(8, 32).copy_(x)
    assert torch.equal(kernels.quantize(x, GRID, -1), kernels.quantize(plain, GRID, -1))
    assert torch.equal(kernels.pack(x, GRID, -1)[0], kernels.pack(plain, GRID, -1)[0])


@pytest.mark.parametrize("backend", [None, REFERENCE])
def test_results_take_no_part_in_autograd(backend):
    weight = torch.nn.Parameter(torch.randn(8, 32))
    with use_backend(backend or kernels.backend_for(weight.device)):
        assert not kernels.quantize(weight, GRID, -1).requires_grad
        assert not kernels.quantize(weight * 2, GRID, -1).requires_grad


def test_a_dimension_out_of_range_is_said_plainly():
    with pytest.raises(ValueError, match=r"dim must be in \[-2, 1\] for a tensor of shape \(4, 5\), got 2"):
        kernels.quantize(torch.randn(4, 5), GRID, 2)


@pytest.mark.parametrize("function", [kernels.quantize, kernels.pack])
@pytest.mark.parametrize("dtype", [torch.int32, torch.float8_e4m3fn])
def test_other_types_are_refused(function, dtype):
    with pytest.raises(TypeError, match=rf"must be float32, bfloat16, float16 or float64, got {dtype}"):
        function(torch.zeros(4, 16).to(dtype), GRID, -1)


def test_codes_of_another_shape_are_refused_and_strided_ones_read():
    codes, exponents = kernels.pack(torch.randn(4, 32), GRID, -1)
    for wrong in [(codes[:3], exponents), (codes, exponents[:, :1]), (codes.int(), exponents)]:
        for unpack in (kernels.unpack, lambda c, e, g, s, d, t: ops.unpack(c, e, g.bits, g.box, None, s, d, t)):
            with pytest.raises(ValueError, match=r"must be uint8 of shapes \(4, 16\) and \(4, 2\), got"):
                unpack(*wrong, GRID, (4, 32), -1, torch.float32)
    with pytest.raises(ValueError, match=r"codes and exponents must be on one device, got cpu and meta"):
        kernels.unpack(codes, exponents.to("meta"), GRID, (4, 32), -1, torch.float32)
    whole = kernels.unpack(codes, exponents, GRID, (4, 32), -1, torch.float32)
    strided = codes.t().contiguous().t(), exponents.t().contiguous().t()
    assert torch.equal(kernels.unpack(*strided, GRID, (4, 32), -1, torch.float32), whole)


def test_masks_of_tensors_whose_memory_is_not_their_values():
    limits = (0.0, float("nan"), True)
    for x in (torch.randn(32, 8).t(), torch._neg_view(torch.randn(8, 32)), torch._efficientzerotensor(8, 32)):
        bits = kernels.pack_mask(x, *limits)
        values = torch.empty(8, 32).copy_(x)
        assert torch.equal(bits, kernels.pack_mask(values, *limits))
        assert torch.equal(kernels.apply_mask(bits, x), values.clamp(min=0))
        y, same_bits = kernels.relu(x)
        assert torch.equal(y, values.clamp(min=0))
        assert torch.equal(same_bits, bits)
    with pytest.raises(ValueError, match=r"bits must be uint8 \(33,\), got torch.uint8 \(32,\)"):
        kernels.unpack_mask(bits, 257, 0.0, 1.0, torch.float32)
    with pytest.raises(ValueError, match=r"bits must be uint8 \(33,\) on cpu, got torch.uint8 \(32,\) on cpu"):
        kernels.apply_mask(bits, torch.zeros(257))


def test_a_checkout_on_the_path_is_not_taken_for_another_package_of_the_name():
    code = "import kernels, dsq; assert not hasattr(kernels, 'pack') and kernels.__version__ == '0'"
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", code], cwd=ROOT, check=False).returncode == 0
