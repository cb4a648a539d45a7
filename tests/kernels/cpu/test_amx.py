"""The kernel for AMX by emulated tiles: it conforms, sums in the documented order, and is not used if it is wrong."""

import itertools
import warnings
from dataclasses import replace

import pytest
import torch

from dsq.formats import BFP
from dsq.kernels import conformance
from dsq.kernels.backend import along_contraction
from dsq.kernels.conformance import linear_disagreements, multiplies
from dsq.kernels.cpu import products
from dsq.kernels.cpu.backend import load
from dsq.kernels.cpu.library import LIBRARY, library
from dsq.kernels.cpu.products import KERNELS, with_first_check
from dsq.kernels.reference.backend import TORCH
from tests.threads import threads

if not LIBRARY.exists() or not library().has_gemm("GEMM_AMX_EMULATED"):
    pytest.skip("the tiles of AMX are emulated by AVX-512 on Linux", allow_module_level=True)

MATMUL = along_contraction(BFP(9), BFP(9))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def emulated_tiles(monkeypatch):
    monkeypatch.setitem(KERNELS, "amx", "GEMM_AMX_EMULATED")


def amx():
    return next(gemm for gemm in load().gemms if gemm.name == "amx")


def multiplied(a_MK, b_KN, bias_N=None):
    return amx().run(MATMUL, a_MK.bfloat16(), b_KN.bfloat16(), bias_N)


def integers(*shape, largest=100):
    return torch.randint(-largest, largest + 1, shape).float()


def test_it_conforms():
    gemm = amx()
    fitting = [product for product in conformance.products() if gemm.fits(product.matmul, torch.float32)]
    assert len(fitting) > 100
    assert [str(product) for product in fitting if not multiplies(gemm, product, CPU)] == []
    layers = list(linear_disagreements(replace(load(), gemms=(gemm, TORCH)), CPU))
    assert len(layers) > 10
    assert [wrong for _, wrong in layers if wrong] == []


#: sizes around tiles of 16, panels of 32 and of 256 steps, tasks of 256 rows, and rows of A that are 4,096 bytes apart
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [(1, 1, 1), (3, 5, 7), (32, 32, 32), (33, 31, 33), (64, 256, 64), (47, 257, 31), (600, 544, 70), (40, 2048, 33)],
)
def test_products_of_any_sizes_and_strides_are_exact(m, k, n):
    # sums of products of small integers stay below 2**24, so any rounding at all would show
    a, b, bias = integers(m, k), integers(k, n, largest=50), integers(n, largest=1000)
    expected = a.double() @ b.double()
    for a_view, b_view, count in itertools.product((a, a.t().contiguous().t()), (b, b.t().contiguous().t()), (1, 2)):
        with threads(count):
            assert torch.equal(multiplied(a_view, b_view).double(), expected)
            assert torch.equal(multiplied(a_view, b_view, bias).double(), expected + bias)


def test_sums_have_the_order_of_the_instruction():
    a, b, bias = (torch.randn(shape).clamp(-4, 4).bfloat16().float() for shape in ((20, 70), (70, 20), (20,)))
    a, b = (torch.where(x.abs() < 2**-6, 0, x) for x in (a, b))  # float64 is exact below
    products_KMN = a.t().double()[:, :, None] * b.double()[:, None, :]
    expected = bias.expand(20, 20)
    for tile in products_KMN.split(32):
        even, odd = torch.zeros(20, 20), torch.zeros(20, 20)
        for step, product in enumerate(tile):
            if step % 2:
                odd = (odd.double() + product).float()
            else:
                even = (even.double() + product).float()
        expected = expected + (even + odd)
    assert torch.equal(multiplied(a, b, bias), expected)
    assert not torch.equal(multiplied(a, b, bias), (products_KMN.sum(0) + bias).float())


def test_subnormal_values_count_as_zero_and_the_thread_keeps_its_mode():
    a = torch.tensor([[2.0**-127, 0], [2.0**-63, 0], [2.0**-60, 1]])
    b = torch.tensor([[2.0**20, 2.0**-65], [0, 0]])
    assert multiplied(a, b).tolist() == [[0, 0], [2.0**-43, 0], [2.0**-40, 2.0**-125]]
    assert (torch.tensor(2.0**-126) / 2).item() == 2.0**-127


def test_a_nan_shows_in_its_row_or_column_and_not_in_the_next_product():
    a, b = torch.ones(40, 40), torch.ones(40, 40)
    a[5, 1] = torch.nan
    assert multiplied(a, b).isnan().any(1).nonzero().tolist() == [[5]]
    assert multiplied(b, a).isnan().any(0).nonzero().tolist() == [[1]]
    multiplied(torch.full((64, 64), torch.nan), torch.full((64, 64), torch.nan))  # in scratch memory
    assert torch.equal(multiplied(b[:33, :33], b[:33, :33]), torch.full((33, 33), 33.0))


def test_a_kernel_that_gets_a_small_product_wrong_is_not_used_and_one_line_says_so(monkeypatch):
    broken_gemm = TORCH._replace(run=lambda *args: TORCH.run(*args) * (1 + 2**-12))
    for gemm in (TORCH, amx()):
        assert with_first_check(gemm).fits(MATMUL, torch.float32)
    monkeypatch.setattr(products, "multiplies", lambda gemm, *args: multiplies(broken_gemm, *args))
    gemm = amx()
    with pytest.warns(UserWarning, match=r"^dsq: the kernel 'amx' is not used: its product 64x320x32 .* is wrong$"):
        assert not gemm.fits(MATMUL, torch.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not gemm.fits(MATMUL, torch.float32)


def test_only_a_machine_with_amx_has_it():
    assert not library().has_gemm("GEMM_AMX") or torch.cpu.get_capabilities()["amx_bf16"]
