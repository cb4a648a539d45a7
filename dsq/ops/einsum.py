"""torch.einsum of two operands as one product of matrices. Shape suffixes: M rows, K the contraction, N columns."""

from collections.abc import Sequence
from math import prod
from string import ascii_letters
from typing import Any, NamedTuple

from torch import Tensor


class Einsum(NamedTuple):
    """The result of an einsum is ``result(a @ b.mT)``; leading axes of both are a batch."""

    a: Tensor  #: (..., M, K)
    b: Tensor  #: (..., N, K)
    rows: str  #: the indices that M stands for
    sizes: tuple[int, ...]  #: of the axes that the product's stand for
    order: tuple[int, ...]  #: of these axes in the result

    def result(self, y: Tensor) -> Tensor:
        """Return the einsum's result of the product ``y`` (..., M, N)."""
        return y.reshape(self.sizes).permute(self.order)


def two_operands(equation: Any, operands: Sequence[Any]) -> tuple[Any, Any] | None:
    """Return the two operands of a call ``torch.einsum(equation, *operands)``; None of a call in another form."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = operands[0]
    return (operands[0], operands[1]) if isinstance(equation, str) and len(operands) == 2 else None


def as_product(equation: str, a: Tensor, b: Tensor, swapped: bool = False) -> Einsum | None:
    """Return the einsum of ``a`` and ``b`` as a product of matrices; ``swapped``: of ``b`` by ``a``.

    None if it is none: a diagonal, an index that one operand alone has and the result has not, no index to sum over,
    axes that broadcast, or a result that the equation leaves open.
    """
    operands, arrow, result = equation.replace(" ", "").partition("->")
    if not arrow or operands.count(",") != 1:
        return None
    a_names, b_names = operands.split(",")
    if swapped:
        a, b, a_names, b_names = b, a, b_names, a_names
    if "." in equation:
        letters = [letter for letter in ascii_letters if letter not in equation]
        dims = [x.dim() - len(names.replace("...", "")) for x, names in ((a, a_names), (b, b_names))]
        leading = "".join(letters[: max(dims)])
        a_names, b_names = (
            names.replace("...", leading[len(leading) - n :]) for names, n in ((a_names, dims[0]), (b_names, dims[1]))
        )
        result = result.replace("...", leading)
    size = dict(zip(a_names + b_names, (*a.shape, *b.shape), strict=False))
    if any(len(set(names)) < len(names) for names in (a_names, b_names, result)):
        return None
    if [*a.shape, *b.shape] != [size[i] for i in a_names + b_names]:
        return None
    batch = [i for i in a_names if i in b_names and i in result]
    summed = [i for i in a_names if i in b_names and i not in result]
    rows, columns = [i for i in a_names if i not in b_names], [i for i in b_names if i not in a_names]
    order = [*batch, *rows, *columns]
    if not summed or sorted(order) != sorted(result):
        return None
    return Einsum(
        _arranged(a, a_names, (*batch, rows, summed), size),
        _arranged(b, b_names, (*batch, columns, summed), size),
        "".join(rows),
        tuple(size[i] for i in order),
        tuple(order.index(i) for i in result),
    )


def _arranged(x: Tensor, names: str, axes: tuple[str | list[str], ...], size: dict[str, int]) -> Tensor:
    """Return ``x``, whose axes are ``names``, with the given axes, each of them one or several of these."""
    x = x.permute([names.index(i) for axis in axes for i in axis])
    return x if len(axes) == x.dim() else x.reshape([prod([size[i] for i in axis]) for axis in axes])
