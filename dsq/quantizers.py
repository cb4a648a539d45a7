"""The formats of a layer, the products that they make, and what every layer has that carries them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from dsq.arguments import choice, whole_number
from dsq.formats import DEFAULT, WIDEST, Format, Identity, named, parse_format
from dsq.kernels.backend import LinearMatMuls, MatMul, Operand
from dsq.operands import MIN_WEIGHT_BITS, UNQUANTIZED_BITS, Operands, OperandSpec, parse_level
from dsq.ops.products import ActivationMatMuls
from dsq.ops.seeds import SeedOffset
from dsq.packing import Rounding
from dsq.precision import Precision

Gemm = Literal["exact", "float32"]


@dataclass(frozen=True)
class Quantizers:
    """The formats of a linear layer, and how they are applied.

    Four formats make the products of the paper. ``operands``, where a level names each operand, makes them instead; its
    formats are the four then as ``of_operands`` gives them. Raises TypeError for what is no format, ValueError for
    unknown words.
    """

    q0: Format  #: the forward product: x and w
    q1: Format  #: the stash: x as the backward reads it, and w in no fewer bits
    q2: Format  #: the gradient dy entering the product for dx
    q3: Format  #: the gradient dy entering the product for dw, and dx leaving the layer
    rounding: Rounding = "nearest"
    gemm: Gemm = "exact"
    min_weight_bits: int = MIN_WEIGHT_BITS  #: of w in the product for dx; 0: w is read at q1, as the paper's Q1
    operands: Operands | None = None  #: without bits: each names a format, or "-"
    always_draws: bool = False  #: a seed at each call, also if nothing is random: in comparisons dropout stays the same
    linear_matmuls: LinearMatMuls = field(init=False, repr=False, compare=False)
    activation_matmuls: ActivationMatMuls = field(init=False, repr=False, compare=False)  #: of two activations
    text: str = field(init=False, repr=False, compare=False)  #: all of the above, as ``parse`` reads it back
    draws: bool = field(init=False, repr=False, compare=False)  #: random numbers, at each call
    #: the level names the format of x in dw, which then reads no values that other operations saved of x
    names_stash: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        choice("rounding", self.rounding, get_args(Rounding))
        choice("gemm", self.gemm, get_args(Gemm))
        whole_number("min_weight_bits", self.min_weight_bits, 0, WIDEST)
        for q in (self.q0, self.q1, self.q2, self.q3):
            if not isinstance(q, Format):
                raise TypeError(f"q0, q1, q2 and q3 must be formats, as dsq.BFP(4), got {q!r}")
        settings = self.rounding, self.gemm, self.min_weight_bits, int(self.always_draws), self.operands or ""
        random = any(operand.stochastic or operand.random_signs for operand in self.operands or ())
        object.__setattr__(self, "draws", random or self.always_draws or self.rounding == "stochastic")
        specs = self._specs()
        object.__setattr__(self, "linear_matmuls", self._linear_matmuls(specs))
        object.__setattr__(self, "activation_matmuls", self._activation_matmuls(specs))
        object.__setattr__(self, "names_stash", self.operands is not None and specs.names_stash)
        object.__setattr__(self, "text", " ".join(map(str, (self.q0, self.q1, self.q2, self.q3, *settings))).strip())

    def _specs(self) -> Operands:
        """Return the operands; those that the four formats name are as the paper places them."""
        if self.operands is not None:
            return self.operands
        w_for_dx = self.backward_weight if self.q1.quantizes else self.q1
        formats = self.q0, self.q0, self.q2, w_for_dx, self.q3, self.q1, self.q3
        return Operands(*(OperandSpec(str(fmt)) if fmt.quantizes else OperandSpec() for fmt in formats))

    def _linear_matmuls(self, specs: Operands) -> LinearMatMuls:
        """Return the products of a layer."""
        x = self._operand(specs.x, -1, SeedOffset.X)
        w = self._operand(specs.w, -1, SeedOffset.W, transposed=True)
        dy_for_dx = self._operand(specs.dy_for_dx, -1, SeedOffset.DY_FOR_DX)
        w_for_dx = self._operand(specs.w_for_dx, 0, SeedOffset.W_FOR_DX, of=w)
        dy_for_dw = self._operand(specs.dy_for_dw, 0, SeedOffset.DY_FOR_DW, transposed=True)
        x_for_dw = self._operand(specs.x_for_dw, 0, SeedOffset.X_FOR_DW, of=x)
        dx = self._operand(specs.dx, -1, SeedOffset.DX)
        exact = self.gemm == "exact"
        return LinearMatMuls(
            MatMul(x, w, exact=exact),
            MatMul(dy_for_dx, w_for_dx, dx.format, dx.seed, dx.nearest, exact),
            MatMul(dy_for_dw, x_for_dw, exact=exact),
        )

    def _activation_matmuls(self, specs: Operands) -> ActivationMatMuls:
        """Return the products of two activations a and b: a takes x's place and b that of w; if w is "-", b is stashed
        as x. Of four formats b is stashed at q1, and both gradients read dy at q2."""
        if self.operands is None:
            specs = specs._replace(w_for_dx=specs.x_for_dw, dy_for_dw=specs.dy_for_dx)
        b_spec = specs.x_for_dw.untransformed() if specs.w_for_dx.format == "-" else specs.w_for_dx
        a = self._operand(specs.x, -1, SeedOffset.X)
        b = self._operand(specs.w, -2, SeedOffset.W)
        dy_for_da = self._operand(specs.dy_for_dx, -1, SeedOffset.DY_FOR_DX)
        b_for_da = self._operand(b_spec, -1, SeedOffset.W_FOR_DX, transposed=True, of=b)
        dy_for_db = self._operand(specs.dy_for_dw, -2, SeedOffset.DY_FOR_DW, transposed=True)
        a_for_db = self._operand(specs.x_for_dw, -2, SeedOffset.X_FOR_DW, of=a)
        products = (a, b), (dy_for_da, b_for_da), (dy_for_db, a_for_db)
        return ActivationMatMuls(*(MatMul(*operands, exact=self.gemm == "exact") for operands in products))

    def _operand(
        self, spec: OperandSpec, axis: int, seed: int, transposed: bool = False, of: Operand | None = None
    ) -> Operand:
        """Return the operand of a product. ``of``: the same matrix in the forward."""
        # without a seed all are; fused kernels ask for one kind of rounding
        nearest = self.draws and not spec.stochastic and self.rounding == "nearest"
        first = of if spec.of_forward else None
        return Operand(spec.resolved, axis, transposed, seed, nearest, spec.hadamard, spec.random_signs, first)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantizers":
        return self  # a copied model keeps the plans of its layers

    @property
    def precision(self) -> Precision:
        if self.operands is not None:
            return Precision.parse(str(self.operands))
        return Precision(self.q0.bits, self.q1.bits, self.q2.bits, self.q3.bits)

    @property
    def backward_weight(self) -> Format:
        """Return the format of w in dx: q1's, in at least ``min_weight_bits`` bits if the forward has as many."""
        return self.q1.at(max(self.q1.bits, min(self.q0.bits, self.min_weight_bits)))

    @property
    def mode(self) -> Literal["simulation", "saving"]:
        """Return "simulation" if a product has a quantized operand or result, but for the stash; else "saving"."""
        return self._specs().mode

    def seed(self) -> int | None:
        """Draw the seed of one call from torch's default generator, as dropout does; None if nothing is random."""
        if not self.draws:
            return None
        seed: Any = torch.randint(2**62, (), device="cpu").item()  # int() is no node of an exported graph
        return seed  # type: ignore[no-any-return]

    @staticmethod
    def parse(text: str) -> "Quantizers":
        """Return the quantizers whose ``text`` this is."""
        words: list[Any] = text.split(maxsplit=8)
        q0, q1, q2, q3 = map(parse_format, words[:4])
        operands = parse_level(words[8]).operands if len(words) > 8 else None
        return Quantizers(q0, q1, q2, q3, words[4], words[5], int(words[6]), operands, words[7] == "1")

    def unquantized(self, but_stash: bool = False) -> "Quantizers":
        """Return quantizers that multiply in floating point, on stashes as they are or, ``but_stash``, at q1; they draw
        seeds as these do, so that dropout stays the same."""
        stash = self._specs().x_for_dw.untransformed() if but_stash else OperandSpec()
        operands = Operands(*[OperandSpec()] * 7)._replace(x_for_dw=stash)
        return replace(Quantizers.of_operands(operands, self.rounding, self.gemm), always_draws=self.draws)

    @staticmethod
    def of_operands(operands: Operands, rounding: Rounding = "nearest", gemm: Gemm = "exact") -> "Quantizers":
        """Return the quantizers of operands that name their formats: q0 is that of x, q1 of the stash, q2 and q3 of dy
        in dx and in dw."""
        specs = operands.x, operands.x_for_dw, operands.dy_for_dx, operands.dy_for_dw
        q0, q1, q2, q3 = (spec.resolved or Identity(UNQUANTIZED_BITS) for spec in specs)
        return Quantizers(q0, q1, q2, q3, rounding, gemm, operands=operands)

    @staticmethod
    def of(precision: "Precision | str | Quantizers") -> "Quantizers":
        """Return quantizers of the default format at ``precision``; quantizers are returned as they are."""
        if isinstance(precision, Quantizers):
            return precision
        return _default(precision if isinstance(precision, Precision) else Precision.parse(precision))

    @staticmethod
    def at(
        precision: Precision,
        family: Callable[[int], Format],
        rounding: Rounding = "nearest",
        gemm: Gemm = "exact",
        min_weight_bits: int = MIN_WEIGHT_BITS,
    ) -> "Quantizers":
        """Return the quantizers of a level, its widths those of ``family``."""
        if precision.text:
            return Quantizers.of_operands(precision.operands_with(min_weight_bits).with_family(family), rounding, gemm)
        q0, q1, q2, q3 = map(family, precision)
        return Quantizers(q0, q1, q2, q3, rounding, gemm, min_weight_bits)


@lru_cache
def _default(precision: Precision) -> Quantizers:
    return Quantizers.at(precision, partial(named, DEFAULT))


#: quantizers by their text, so that all layers share the products that caches of kernels go by
_PARSED: dict[str, Quantizers] = {}


NO_JIT = "use torch.compile or torch.export, or call dsq.unconvert(model) first"


class Quantized:
    """The mixin of every converted layer, before the class that the layer had."""

    original: ClassVar[type[nn.Module]]  #: the class before conversion: ``dsq.unconvert`` goes back to it
    quantizers_text: str  #: from which ``quantizers`` are read
    eval_full_precision: bool = False
    graph_packs: bool = False  #: graphs, which ``dsq.inductor_options`` make, pack x themselves
    conversion: Mapping[str, Any] = MappingProxyType({})  #: the options of ``dsq.convert`` that it alone acts on
    training: bool

    @property
    def quantizers(self) -> Quantizers:
        """Return the formats of the layer now.

        A layer holds their text: of an object that it held, and that changed, a compiler would take the widths for
        symbols where FSDP2 shards the layer, and no format can be made of symbols.
        """
        if self.quantizers_text not in _PARSED:  # unpickled in another process
            _PARSED[self.quantizers_text] = Quantizers.parse(self.quantizers_text)
        return _PARSED[self.quantizers_text]

    @quantizers.setter
    def quantizers(self, value: Quantizers) -> None:
        self.quantizers_text = value.text
        _PARSED.setdefault(value.text, value)

    @property
    def evaluates_unquantized(self) -> bool:
        """Return whether a call now would multiply in floating point."""
        return self.eval_full_precision and not self.training

    def __prepare_scriptable__(self) -> None:
        """Refuse torch.jit.script, which asks each module for what stands for it."""
        raise RuntimeError(f"torch.jit.script takes no converted layers; {NO_JIT}")

    def extra_repr(self) -> str:
        q = self.quantizers
        formats = dict.fromkeys(type(fmt).__name__ for fmt in (q.q0, q.q1, q.q2, q.q3))  # wide widths have another
        families = "" if q.operands else f", format={'/'.join(formats)}"
        settings = f"precision={q.precision}{families}"
        return ", ".join(filter(None, (super().extra_repr(), settings)))  # type: ignore[misc]
