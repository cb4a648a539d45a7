"""How the products of a layer are multiplied on this machine, and what each way costs."""

from dataclasses import dataclass
from math import prod

import torch

from dsq.command import table
from dsq.kernels.backend import LinearMatMuls
from dsq.kernels.dispatch import backend_for, gemm_for
from dsq.kernels.tuning import size_class, timed


@dataclass(frozen=True)
class ProductChoice:
    """One product of a layer: the kernel that multiplies it, and the microseconds of all that could."""

    product: str  #: y, dx or dw
    sizes: tuple[int, int, int]  #: rows, columns, depth
    timed_sizes: tuple[int, int, int]  #: the sizes that stand for them
    kernel: str
    microseconds: dict[str, float]  #: by kernel, operands quantised or packed on the way


@dataclass(frozen=True)
class Explanation:
    """The three products of a layer; ``print`` shows a table."""

    backend: str
    products: tuple[ProductChoice, ...]

    def __str__(self) -> str:
        rows = [
            {"product": p.product, "sizes": "x".join(map(str, p.sizes)), "kernel": p.kernel}
            | {f"{name}, us": us for name, us in p.microseconds.items()}
            for p in self.products
        ]
        names = dict.fromkeys(name for row in rows for name in row)
        return f"{self.backend}\n{table(rows, {name: '.0f' if name.endswith('us') else '' for name in names})}"


def explain_linear(matmuls: LinearMatMuls, x_shape: tuple[int, ...], w_shape: tuple[int, int]) -> Explanation:
    """Time every kernel that fits a product of a layer of ``w_shape`` (N, K), on float32 x of ``x_shape`` (..., K)."""
    backend = backend_for(torch.device("cpu"))
    tokens, (out_features, in_features) = prod(x_shape[:-1]), w_shape
    x_TK, dy_TN, w_NK = map(torch.Size, ((tokens, in_features), (tokens, out_features), w_shape))
    operands = {"y": (matmuls.output, x_TK, w_NK), "dx": (matmuls.input_gradient, dy_TN, w_NK)}
    operands["dw"] = (matmuls.weight_gradient, dy_TN, x_TK)
    choices = []
    for name, (matmul, a, b) in operands.items():
        sizes = matmul.sizes(a, b)
        fitting = [gemm for gemm in backend.gemms if gemm.fits(matmul, torch.float32)]
        times = timed(fitting, matmul, torch.float32, size_class(sizes), backend)
        chosen = gemm_for(matmul, torch.float32, sizes, backend).name
        microseconds = {trial.gemm.name: trial.seconds * 1e6 for trial in times}
        choices.append(ProductChoice(name, sizes, size_class(sizes), chosen, microseconds))
    return Explanation(backend.name, tuple(choices))
