"""An einsum as a product of matrices, against torch.einsum."""

import pytest
import torch

from dsq.ops.einsum import as_product

SIZES = {"b": 3, "h": 2, "t": 5, "s": 7, "d": 4, "e": 6}
PRODUCTS = ["bhtd,bhsd->bhts", "bthd,bshd->bhts", "bhts,bshd->bthd", "btd,de->bte", "btd,dhe->bthe", "bthe,hed->btd"]
PRODUCTS += ["td,sd->st", "bdte,bdes->sbt", "btd,btd->bt", "bd,bd->b", " b t d , d e -> b t e"]


def operands(equation: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    names = equation.replace(" ", "").split("->")[0].split(",")
    return [torch.randn([SIZES[name] for name in it], dtype=torch.float64) for it in names]


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("equation", PRODUCTS)
def test_an_equation_is_a_product_of_matrices(equation, swapped):
    a, b = operands(equation)
    made = as_product(equation, a, b, swapped)
    torch.testing.assert_close(made.result(made.a @ made.b.mT), torch.einsum(equation, a, b))


@pytest.mark.parametrize("equation", ["...td,...sd->...ts", "...d,de->...e", "td,...d->...t"])
def test_an_ellipsis_stands_for_leading_axes(equation):
    torch.manual_seed(0)
    letters = equation.replace("...", "bh").replace(" ", "")
    a, b = operands(letters)
    made = as_product(equation, a, b)
    torch.testing.assert_close(made.result(made.a @ made.b.mT), torch.einsum(letters, a, b))


@pytest.mark.parametrize("equation", ["bb,bd->bd", "bt,td->d", "bt,ts->b", "bt,bd->btd", "bt,td", "bt,td,de->be"])
def test_an_equation_that_is_no_product_of_matrices_gives_none(equation):
    assert as_product(equation, *operands(equation)[:2]) is None


def test_axes_that_broadcast_are_left_to_torch():
    assert as_product("btd,bds->bts", torch.ones(1, 5, 4), torch.ones(3, 4, 7)) is None
    assert as_product("...td,...ds->...ts", torch.ones(1, 5, 4), torch.ones(3, 4, 7)) is None
