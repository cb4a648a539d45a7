"""The four formats of a layer, the products that they make, and what every layer has that carries them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import nn

from dsq.arguments import choice, whole_number
from dsq.formats import DEFAULT, WIDEST, Format, named, parse_format
from dsq.kernels.backend import LinearMatMuls, MatMul, Operand
from dsq.ops.products import ProductMatMuls, product_matmuls
from dsq.packing import Rounding
from dsq.precision import Precision

#: least bits of w in the backward. The weight is not stashed, so these bits cost no memory, and all tokens share its
#: rounding error, so no batch averages it out. With 5 bits instead of 4 a GPT's gradient error falls by 9 %, by 18 %
#: under stash="all"; with 8 by 13 and 27 %. AVX2 multiplies codes of 13 bits together: 8 of dy leave 5, and 8 of w cost
#: a tenth of a step there. In eleven translations under stash="all" 8 gained nothing (-.007 nats +- .018, 2026-11-28).
MIN_WEIGHT_BITS = 5
Gemm = Literal["exact", "float32"]


#: those that layers were given, by their text
_BY_TEXT: dict[str, "Quantizers"] = {}


@dataclass(frozen=True)
class Quantizers:
    """The four formats of a linear layer, and how they are applied.

    Raises TypeError for what is no format, ValueError for unknown words.
    """

    q0: Format  #: the forward product: x and w
    q1: Format  #: the stash: x as the backward reads it, and w in no fewer bits
    q2: Format  #: the gradient dy entering the product for dx
    q3: Format  #: the gradient dy entering the product for dw, and dx leaving the layer
    rounding: Rounding = "nearest"
    gemm: Gemm = "exact"
    min_weight_bits: int = MIN_WEIGHT_BITS  #: of w in the product for dx; 0: w is read at q1, as the paper's Q1
    matmuls: LinearMatMuls = field(init=False, repr=False, compare=False)
    products: ProductMatMuls = field(init=False, repr=False, compare=False)  #: of two activations
    text: str = field(init=False, repr=False, compare=False)  #: all of the above

    def __post_init__(self) -> None:
        choice("rounding", self.rounding, get_args(Rounding))
        choice("gemm", self.gemm, get_args(Gemm))
        whole_number("min_weight_bits", self.min_weight_bits, 0, WIDEST)
        for q in (self.q0, self.q1, self.q2, self.q3):
            if not isinstance(q, Format):
                raise TypeError(f"q0, q1, q2 and q3 must be formats, as dsq.BFP(4), got {q!r}")
        q0, q1, q2, q3 = (q if q.quantizes else None for q in (self.q0, self.q1, self.q2, self.q3))
        w = self.backward_weight if q1 else None
        exact = self.gemm == "exact"
        matmuls = LinearMatMuls(  # each operand has a seed offset of its own, so that no two share random numbers
            MatMul(Operand(q0, -1, seed=0), Operand(q0, -1, transposed=True, seed=1), exact=exact),
            MatMul(Operand(q2, -1, seed=4), Operand(w, 0, seed=3), result=q3, result_seed=6, exact=exact),
            MatMul(Operand(q3, 0, transposed=True, seed=5), Operand(q1, 0, seed=2), exact=exact),
        )
        object.__setattr__(self, "matmuls", matmuls)
        object.__setattr__(self, "products", product_matmuls(self.q0, self.q1, self.q2))
        named = *map(str, (self.q0, self.q1, self.q2, self.q3)), self.rounding, self.gemm, str(self.min_weight_bits)
        object.__setattr__(self, "text", " ".join(named))

    def __deepcopy__(self, memo: dict[int, Any]) -> "Quantizers":
        return self  # a copied model keeps the plans of its layers

    @property
    def precision(self) -> Precision:
        return Precision(self.q0.bits, self.q1.bits, self.q2.bits, self.q3.bits)

    @property
    def backward_weight(self) -> Format:
        """Return the format of w in dx: q1's, in at least ``min_weight_bits`` bits if the forward has as many."""
        return self.q1.at(max(self.q1.bits, min(self.q0.bits, self.min_weight_bits)))

    def seed(self) -> int | None:
        """Draw the seed of one call from torch's default generator; None if rounding is to nearest."""
        if self.rounding == "nearest":
            return None
        seed: Any = torch.randint(2**62, (), device="cpu").item()  # int() is no node of an exported graph
        return seed  # type: ignore[no-any-return]

    @staticmethod
    def parse(text: str) -> "Quantizers":
        """Return the quantizers whose ``text`` this is."""
        *formats, rounding, gemm, bits = text.split()
        q0, q1, q2, q3 = map(parse_format, formats)
        return Quantizers(q0, q1, q2, q3, rounding, gemm, int(bits))  # type: ignore[arg-type]

    @staticmethod
    def of(precision: "Precision | str | Quantizers") -> "Quantizers":
        """Return quantizers of the default format at ``precision``; quantizers are returned as they are."""
        if isinstance(precision, Quantizers):
            return precision
        return _default(precision if isinstance(precision, Precision) else Precision.parse(precision))


@lru_cache
def _default(precision: Precision) -> Quantizers:
    q0, q1, q2, q3 = (named(DEFAULT, bits) for bits in precision)
    return Quantizers(q0, q1, q2, q3)


NO_JIT = "use torch.compile or torch.export, or call dsq.unconvert(model) first"


class Quantized:
    """The mixin of every converted layer, before the class that the layer had."""

    plain: ClassVar[type[nn.Module]]  #: the class before conversion: ``dsq.unconvert`` goes back to it
    formats: str  #: the text of ``quantizers``
    eval_full_precision: bool = False
    conversion: Mapping[str, Any] = MappingProxyType({})  #: the options of ``dsq.convert`` that it alone acts on
    training: bool

    @property
    def quantizers(self) -> Quantizers:
        """Return the formats of the layer now.

        A layer holds their text: of an object that it held, and that changed, a compiler would take the widths for
        symbols where FSDP2 shards the layer, and no format can be made of symbols.
        """
        if self.formats not in _BY_TEXT:  # unpickled in another process
            _BY_TEXT[self.formats] = Quantizers.parse(self.formats)
        return _BY_TEXT[self.formats]

    @quantizers.setter
    def quantizers(self, value: Quantizers) -> None:
        self.formats = value.text
        _BY_TEXT.setdefault(value.text, value)

    @property
    def evaluates_plain(self) -> bool:
        """Return whether a call now would multiply in floating point."""
        return self.eval_full_precision and not self.training

    def __prepare_scriptable__(self) -> None:
        """Refuse torch.jit.script, which asks each module for what stands for it."""
        raise RuntimeError(f"torch.jit.script takes no converted layers; {NO_JIT}")

    def extra_repr(self) -> str:
        q = self.quantizers
        formats = dict.fromkeys(type(fmt).__name__ for fmt in (q.q0, q.q1, q.q2, q.q3))  # wide widths have another
        own = f"precision={q.precision}, format={'/'.join(formats)}"
        return ", ".join(filter(None, (super().extra_repr(), own)))  # type: ignore[misc]
