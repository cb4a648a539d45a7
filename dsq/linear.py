"""A linear layer at [q0, q1, q2, q3]: dynamic stashing quantization (DSQ, section 3, figure 2).

    forward    y  = Q0(x) Q0(w)^T + b              stash Q1(x), packed
    backward   dx = Q3(Q2(dy) Q1(w))
               dw = Q3(dy)^T Q1(x)
               db = sum of dy over tokens

Shape suffixes: T tokens (all leading dimensions), K in-features, N out-features. Boxes run along the contraction axis
of the product that consumes the tensor: K for y, N for dx, T for dw. Q1(w) is made again in the backward from the
weight, which still exists then: the same numbers, and no bytes in the stash.

Quantizers -> LinearMatMuls (below) -> dsq.ops.linear_passes -> dsq.kernels
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function

from dsq.arguments import choice
from dsq.formats import DEFAULT, NARROWEST, Format, check_stored, format_class
from dsq.formats.layout import BoxAxis
from dsq.kernels.backend import Codes, Dtypes, LinearMatMuls, MatMul, Operand
from dsq.ops import linear_passes
from dsq.ops.product import ProductMatMuls, product_matmuls
from dsq.ops.transformed_linear import transformed_linear
from dsq.packing import Rounding
from dsq.precision import DEFAULT_LEVELS, Precision

_exporting = torch.compiler.is_exporting
_function_transform = torch._C._functorch.peek_interpreter_stack
_function_mode = torch._C._is_torch_function_mode_enabled
Units = Literal["exact", "float32"]


@dataclass(frozen=True)
class Quantizers:
    """The four formats of a linear layer, and how they are applied."""

    q0: Format  #: the forward product: x and w
    q1: Format  #: the stash: x and w as the backward reads them
    q2: Format  #: the gradient dy entering the product for dx
    q3: Format  #: the gradient dy entering the product for dw, and dx leaving the layer
    rounding: Rounding = "nearest"
    box_axis: BoxAxis = "contraction"
    units: Units = "exact"
    matmuls: LinearMatMuls = field(init=False, repr=False, compare=False)
    products: ProductMatMuls = field(init=False, repr=False, compare=False)  #: of two activations

    def __post_init__(self) -> None:
        """Raises TypeError for what is no format, ValueError for one that no kernel stores and for unknown words."""
        choice("rounding", self.rounding, get_args(Rounding))
        choice("box_axis", self.box_axis, get_args(BoxAxis))
        choice("units", self.units, get_args(Units))
        for q in (self.q0, self.q1, self.q2, self.q3):
            if not isinstance(q, Format):
                raise TypeError(f"q0, q1, q2 and q3 must be formats, as dsq.BFP(4), got {q!r}")
            check_stored(q)
        q0, q1, q2, q3 = (q if q.packs else None for q in (self.q0, self.q1, self.q2, self.q3))
        tokens = 0 if self.box_axis == "contraction" else -1
        exact = self.units == "exact"
        matmuls = LinearMatMuls(  # a seed an operand: random numbers of its own
            MatMul(Operand(q0, -1, seed=0), Operand(q0, -1, transposed=True, seed=1), exact=exact),
            MatMul(Operand(q2, -1, seed=4), Operand(q1, tokens, seed=3), result=q3, result_seed=6, exact=exact),
            MatMul(Operand(q3, tokens, transposed=True, seed=5), Operand(q1, tokens, seed=2), exact=exact),
        )
        object.__setattr__(self, "matmuls", matmuls)
        object.__setattr__(self, "products", product_matmuls(self.q0, self.q1, self.q2))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantizers":
        return self  # a copied model keeps the caches of its kernels

    @property
    def precision(self) -> Precision:
        return Precision(self.q0.bits, self.q1.bits, self.q2.bits, self.q3.bits)

    def seed(self) -> int | None:
        """Of one call, from torch's default generator; None rounds to nearest."""
        if self.rounding == "nearest":
            return None
        seed: Any = torch.randint(2**62, (), device="cpu").item()  # int() is no node of an exported graph
        return seed  # type: ignore[no-any-return]

    @staticmethod
    def of(precision: "Precision | str | Quantizers") -> "Quantizers":
        """The default format at ``precision`` with every default; quantizers pass through."""
        if isinstance(precision, Quantizers):
            return precision
        return _default(precision if isinstance(precision, Precision) else Precision.parse(precision))


@lru_cache
def _default(precision: Precision) -> Quantizers:
    q0, q1, q2, q3 = map(format_class(DEFAULT)(NARROWEST).at, precision)
    return Quantizers(q0, q1, q2, q3)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, precision: Precision | str | Quantizers) -> Tensor:
    """``torch.nn.functional.linear`` with the tensors of its three products quantised, and a packed stash.

    Where a gradient will be wanted for ``weight``, what stays in memory is Q1(x) in its own bits, once for all calls
    that share ``x``; without one (or under ``no_grad``) nothing stays. For a gradient of ``x`` the weight itself stays,
    under autocast too, where F.linear keeps a copy: it must not change in place before the backward. Stochastic
    rounding draws its seed from torch's default generator. Differentiable once.

    Args:
        x: (..., K) floating tensor, any number of leading dimensions.
        weight: (N, K), of the dtype of ``x``. Under autocast dtypes may differ, as for F.linear; the operands are
            quantised from the tensors as they are, not from copies in autocast's dtype.
        bias: (N,) or None.
        precision: Quantizers, or four widths of the default format, rounded to nearest: "[4,4,4,8]".
    Returns:
        (..., N) tensor of the dtype of ``x``, or of autocast's.
    Raises:
        TypeError: dtypes that differ, what is no dense tensor.
        ValueError: shapes or devices that do not fit, a malformed precision.
    """
    if _function_mode():  # which then sees one call, not each attribute of a tensor that is read below
        y: Tensor = handle_torch_function(linear, (x, weight, bias), x, weight, bias, precision)
        return y
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))):
        given = ", ".join(type(it).__name__ for it in (x, weight, bias))
        raise TypeError(f"x, weight and bias must be tensors, got {given}")
    quantizers = Quantizers.of(precision)
    seed = quantizers.seed()
    wanted = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    if wanted or linear_passes.forward_mode():  # which the functions refuse; the kernels would lose the tangents
        if _exporting():  # the operators themselves, which refuse a backward
            return linear_passes.forward(quantizers.matmuls, x, weight, bias, seed, stashing=False)[0]
        if _function_transform() is not None:
            return transformed_linear(x, weight, bias, quantizers.matmuls, seed)
        y = _Linear.apply(x, weight, bias, quantizers.matmuls, seed)  # type: ignore[no-untyped-call]
        return y
    return linear_passes.forward(quantizers.matmuls, x, weight, bias, seed, stashing=False)[0]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_NK: Tensor, bias_N: Tensor | None, matmuls: LinearMatMuls, seed: int | None
    ) -> Tensor:
        x_wanted, w_wanted = ctx.needs_input_grad[:2]
        y, stash = linear_passes.forward(matmuls, x, w_NK, bias_N, seed, stashing=w_wanted)
        codes, scales, ctx.stash_shape = stash if isinstance(stash, Codes) else (stash, None, None)
        ctx.save_for_backward(w_NK if x_wanted else None, codes, scales)
        ctx.matmuls, ctx.seed, ctx.dtypes = matmuls, seed, Dtypes(x.dtype, w_NK.dtype, y.dtype)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError("dsq.functional.linear is differentiable once: create_graph=True is not supported")
        w_NK, x1, scales = ctx.saved_tensors
        if scales is not None:
            x1 = Codes(x1, scales, ctx.stash_shape)
        dx, dw_NK = linear_passes.backward(ctx.matmuls, ctx.dtypes, dy, w_NK, x1, ctx.seed)
        db_N = linear_passes.matrix(dy).sum(0) if ctx.needs_input_grad[2] else None
        return dx, dw_NK, db_N, None, None


class Quantised:
    """What every converted layer has, beside the class that it had before."""

    plain: ClassVar[type[nn.Module]]  #: that class: ``dsq.unconvert`` goes back to it
    quantizers: Quantizers
    eval_full_precision: bool = False
    conversion: Mapping[str, Any] = MappingProxyType({})  #: what ``dsq.convert`` was asked for that it alone acts on
    training: bool

    def multiply(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """``linear`` at the layer's level; in floating point where it evaluates so."""
        if self.evaluates_plain:
            return F.linear(x, weight, bias)
        if type(weight) not in (nn.Parameter, Tensor) and hasattr(weight, "device_mesh"):
            from dsq.ops.tensor_parallel import sharded_linear  # torch.distributed.tensor takes half a second

            q = self.quantizers
            return sharded_linear(_Linear.apply, x, weight, bias, q.matmuls, q.seed())
        return linear(x, weight, bias, self.quantizers)

    @property
    def evaluates_plain(self) -> bool:
        """Whether a call now would multiply in floating point."""
        return self.eval_full_precision and not self.training

    def extra_repr(self) -> str:
        q = self.quantizers
        formats = dict.fromkeys(type(fmt).__name__ for fmt in (q.q0, q.q1, q.q2, q.q3))  # the wide ones differ
        own = f"precision={q.precision}, format={'/'.join(formats)}"
        return ", ".join(filter(None, (super().extra_repr(), own)))  # type: ignore[misc]


class Linear(Quantised, nn.Linear):
    """``nn.Linear`` whose three products run quantised and whose stash is packed; same parameters, same state dict.

    In training mode and in evaluation alike the forward runs at q0; ``eval_full_precision`` makes evaluation run in
    floating point. Shapes and errors are those of ``dsq.functional.linear``.
    """

    plain = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        precision: Precision | str | Quantizers = DEFAULT_LEVELS[0],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.quantizers = Quantizers.of(precision)

    def forward(self, input: Tensor) -> Tensor:  # the name is nn.Linear's
        return self.multiply(input, self.weight, self.bias)
