"""Products of bfloat16 where the CPU has no instructions for them: float32's, of the same values."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq
from dsq.kernels import product_dtype
from dsq.ops import linear_passes
from dsq.ops.unquantized_passes import in_product_dtype

BF16 = torch.bfloat16


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU without instructions for bfloat16."""

    def forget() -> None:
        product_dtype.product_dtype.cache_clear()
        linear_passes._plans.clear()

    monkeypatch.setattr(product_dtype, "_emulates_bfloat16", lambda: True)
    forget()
    yield
    forget()


def test_only_products_on_a_cpu_without_instructions_change_their_dtype(emulated: None) -> None:
    cases = [(BF16, "cpu"), (BF16, "cuda"), (torch.float32, "cpu"), (torch.float64, "cpu")]
    assert [product_dtype.product_dtype(*case) for case in cases] == [torch.float32, BF16, torch.float32, torch.float64]
    operands = []
    with torch.autocast("cpu", BF16):
        in_product_dtype(lambda x: operands.append(x) or x, torch.tensor([1 + 2**-12]))
    (cast,) = operands
    assert cast.dtype == torch.float32
    assert cast.item() == 1  # rounded before it is widened


@pytest.mark.parametrize("autocast", [False, True])
def test_the_result_is_of_rounded_operands_and_rounded(emulated: None, autocast: bool) -> None:
    a, b = torch.randn(5, 40), torch.randn(40, 3)
    seen = []

    def run(*operands: Tensor) -> tuple[Tensor, None]:
        seen.extend(x.dtype for x in operands)
        return torch.matmul(*operands), None

    operands = (a, b) if autocast else (a.to(BF16), b.to(BF16))
    with torch.autocast("cpu", BF16, enabled=autocast):
        y, none = in_product_dtype(run, *operands)
    assert seen == [torch.float32] * 2
    assert none is None
    exact = a.to(BF16).double() @ b.to(BF16).double()
    torch.testing.assert_close(y, exact.to(BF16), rtol=2**-7, atol=2**-8)


def test_operands_of_two_dtypes_are_refused_as_by_pytorch(emulated: None) -> None:
    with pytest.raises(RuntimeError, match="dtype"):
        in_product_dtype(torch.matmul, torch.randn(2, 2, dtype=BF16), torch.randn(2, 2))


@pytest.mark.parametrize(
    "operands", [(torch.ones(2, 2, dtype=torch.int64), torch.ones(2, 2)), (torch.ones(2, 2), torch.ones(2, 2).double())]
)
def test_autocast_refuses_what_it_refuses_without(emulated: None, operands: tuple[Tensor, Tensor]) -> None:
    with torch.autocast("cpu", BF16), pytest.raises(RuntimeError, match="dtype"):
        in_product_dtype(torch.matmul, *operands)


def test_a_gradient_in_float32_stays_it_inside_of_autocast(emulated: None) -> None:
    x, convolution = torch.randn(2, 4, 9), nn.Conv1d(4, 4, 3)
    gradients = []
    for converts in (False, True):
        if converts:
            dsq.stash.apply(convolution, "bfp", bits=16)
        convolution.zero_grad()
        with torch.autocast("cpu", BF16):
            with torch.autocast("cpu", enabled=False):
                loss = convolution(x).square().mean()
            loss.backward()
        gradients.append(convolution.weight.grad)
    assert (gradients[1] - gradients[0]).norm() < 1e-4 * gradients[0].norm()


class Products(nn.Module):
    """A converted layer, one that is not, a product of activations, and a convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.plain = nn.Linear(16, 16), nn.Parameter(torch.randn(16, 16) / 4)
        self.convolution = nn.Conv1d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(self.first(x), self.plain)
        x = torch.softmax(x @ x.mT, -1) @ x
        return self.convolution(x.mT)


def test_saving_under_autocast_has_the_gradients_of_bfloat16(emulated: None) -> None:
    torch.manual_seed(0)
    model, x = Products(), torch.randn(4, 32, 16)

    def gradients(autocast: bool) -> Tensor:
        model.zero_grad()
        with torch.autocast("cpu", BF16, enabled=autocast):
            y = model(x)
        assert y.dtype == (BF16 if autocast else torch.float32)
        y.float().square().mean().backward()
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    exact, rounded = gradients(False), gradients(True)
    dsq.convert(model, dsq.DSQConfig("[-,8,-,-]", stash="all"))
    error = (gradients(True) - exact).norm() / exact.norm()
    assert error < 2 * (rounded - exact).norm() / exact.norm()
