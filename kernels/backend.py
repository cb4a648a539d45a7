"""The kernels of a device, as one record of functions (Backend). kernels/reference defines the result of each.

Shape suffixes: M rows, N columns, K the contraction; T tokens.
"""

import math
from ast import literal_eval
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsq.formats import Format, Layout, parse_format

#: dtypes that kernels read and write
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
#: dtypes that callers may pass: float64 is rounded to float32 first, or the reference serves it (masks, affine codes)
FLOATS = frozenset((*DTYPES, torch.float64))


Sizes = tuple[int, int, int]  #: rows, columns and depth of a product


class Codes(NamedTuple):
    """A packed matrix: the codes and scales of ``pack``, and the shape of the values."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size


class Groups(NamedTuple):
    """The groups of values that are coded together. Values in one long row are divided into runs of ``run`` consecutive
    values, and run i belongs to group ``i % number``. A short last run belongs to the last group.
    """

    run: int
    number: int


class AffineCodes(NamedTuple):
    """Codes that count steps from the low of each group (kernels/reference/stash.py)."""

    codes: Tensor  #: uint8, a bitstream: (ceil(values * bits / 8),)
    ranges: Tensor  #: (2, groups): the low of each group, and the step between neighboring codes


class MovingRanges(NamedTuple):
    """Ranges that follow the tensors coded in them: exponential means (Mesa, equations 6 and 7)."""

    alpha_beta: Tensor  #: (2, groups), contiguous: width and low of each group; NaN before the first tensor
    decay: float  #: the weight of the previous mean, 0 to 1


def check_codes(codes: Tensor, scales: Tensor, fmt: Format, layout: Layout) -> None:
    """Raise ValueError unless shapes and dtypes are those of this layout, by which kernels read memory."""
    shapes = _code_shapes(fmt, layout)
    if codes.device != scales.device:
        raise ValueError(f"codes and scales must be on one device, got {codes.device} and {scales.device}")
    if (codes.shape, scales.shape) != shapes or codes.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(
            f"codes and scales must be uint8 of shapes {shapes[0]} and {shapes[1]}, got "
            f"{codes.dtype} {tuple(codes.shape)} and {scales.dtype} {tuple(scales.shape)}"
        )


@lru_cache(maxsize=256)
def _code_shapes(fmt: Format, layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return layout.code_shape(fmt.bits), fmt.scale_shape(layout)


@dataclass(frozen=True, slots=True)
class Operand:
    """The format and orientation in which a matrix enters a product."""

    format: Format | None  #: None: as it is
    axis: int  #: of its blocks
    transposed: bool = False  #: whether its transpose is multiplied
    seed: int = 0  #: added to the seed of the product, so that operands differ in their random numbers
    nearest: bool = False  #: whether to round to nearest even if the product rounds stochastically
    hadamard: int = 0  #: the size of a Hadamard transform along the axis before rounding; 0: none
    random_signs: bool = False  #: whether the transform has random signs
    first: "Operand | None" = None  #: an operand as which the matrix is quantized before all this

    @property
    def packs(self) -> bool:
        """Whether a stash saves the matrix as codes, or else unquantized."""
        return self.format is not None and self.format.packs

    @property
    def transforms(self) -> bool:
        """Whether its codes are those of other values than the matrix."""
        return self.hadamard > 0 or self.first is not None

    @property
    def is_of_one_call(self) -> bool:
        """Whether another call's codes do not serve: they have signs, or a rounding in the forward, of their own."""
        return self.random_signs or (self.first is not None and not self.first.nearest)

    def seed_of(self, seed: int | None) -> int | None:
        """Return the seed of its rounding from the seed of the product; None: round to nearest."""
        return None if seed is None or self.nearest else seed + self.seed

    @property
    def quantized_to(self) -> Format:
        """Return the format of an operand that has one."""
        assert self.format is not None
        return self.format


@dataclass(frozen=True, slots=True, eq=False)  # compared by identity, so that caches look it up fast
class MatMul:
    """The product ``a b`` of quantized operands, with a quantized result if ``result`` is given."""

    a: Operand
    b: Operand
    result: Format | None = None  #: blocks along the last axis
    result_seed: int = 0
    #: whether to round the result to nearest even if the operands are rounded stochastically
    result_nearest: bool = False
    exact: bool = True  #: by the fastest kernel whose products of values are exact; else in the operands' own dtype
    text: str = field(init=False, repr=False)  #: for ``parse_matmul``: a registered operator takes text

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", repr(_as_tuple(self)))

    def seed_of_result(self, seed: int | None) -> int | None:
        """Return the seed of the result's rounding from the seed of the product; None: round to nearest."""
        return None if seed is None or self.result_nearest else seed + self.result_seed

    @property
    def rounds_alike(self) -> bool:
        """Whether fused kernels support it: all roundings are of one kind, and no operand is transformed."""
        return not any((self.a.nearest, self.b.nearest, self.a.transforms, self.b.transforms, self.result_nearest))

    def sizes(self, a_shape: torch.Size, b_shape: torch.Size) -> Sizes:
        """Return the sizes of the product of matrices, or of batches of them, of these shapes before transposition."""
        a_axis, b_axis = self.contracted()
        return a_shape[-1 - a_axis], b_shape[-1 - b_axis], a_shape[a_axis - 2]

    def contracted(self) -> tuple[int, int]:
        """Return the axes of ``a`` and ``b`` over which the product sums, before either is transposed."""
        return (0 if self.a.transposed else 1), (1 if self.b.transposed else 0)

    def transposed(self) -> "MatMul":
        """Return the product of the same matrices that gives the transpose of this one."""
        a, b = (replace(x, transposed=not x.transposed) for x in (self.b, self.a))
        return replace(self, a=a, b=b)

    def blocks_match(self) -> bool:
        """Return whether both operands have blocks of one length along the contraction, or one scale each."""
        a, b = self.a, self.b
        if a.format is None or b.format is None or a.format.block_size != b.format.block_size:
            return False
        return a.format.block_size == 0 or (a.axis % 2, b.axis % 2) == self.contracted()


@lru_cache(maxsize=256)
def parse_matmul(text: str) -> MatMul:
    """Return the product of a ``MatMul.text``. Raises ValueError for another text, as an exported program may have."""
    try:
        a, b, result, *options = literal_eval(text)
    except (SyntaxError, ValueError):
        raise ValueError(f"matmul is of another version of dsq: export the program again; got {text!r}") from None
    return MatMul(_operand(a), _operand(b), result and parse_format(result), *options)


def _operand(values: tuple[Any, ...]) -> Operand:
    fmt, *options, first = values
    return Operand(*[fmt and parse_format(fmt), *options, first and _operand(first)])


def _as_tuple(record: Operand | MatMul) -> tuple[Any, ...]:
    """Return the arguments that make an equal record, formats as text and operands as tuples."""
    values = (getattr(record, field.name) for field in fields(record) if field.init)
    return tuple(str(v) if isinstance(v, Format) else _as_tuple(v) if isinstance(v, Operand) else v for v in values)


class LinearMatMuls(NamedTuple):
    """The three products of a linear layer (equations: dsq.linear)."""

    output: MatMul  #: of x and w
    input_gradient: MatMul  #: of dy and w
    weight_gradient: MatMul  #: of dy and the packed x

    @property
    def x_for_dw(self) -> Operand:
        """The form in which x is saved for the backward."""
        return self.weight_gradient.b


def along_contraction(a: Format, b: Format, transposed: tuple[bool, bool] = (False, True)) -> MatMul:
    """Return the product of formats with blocks along the contraction; by default that of x (M, K) and w (N, K)."""
    a_transposed, b_transposed = transposed
    return MatMul(
        Operand(a, 0 if a_transposed else 1, a_transposed), Operand(b, 1 if b_transposed else 0, b_transposed)
    )


@lru_cache(maxsize=256)
def of_stored_transpose(matmuls: LinearMatMuls) -> LinearMatMuls:
    """Return the products for a w that is stored as (K, N), as in other libraries."""
    output, input_gradient = (
        replace(matmul, b=replace(matmul.b, axis=-1 - matmul.b.axis, transposed=not matmul.b.transposed))
        for matmul in matmuls[:2]
    )
    return matmuls._replace(output=output, input_gradient=input_gradient)


class Dtypes(NamedTuple):
    """The dtypes of a linear layer's tensors and of their gradients. They differ under autocast."""

    x: torch.dtype
    w: torch.dtype
    y: torch.dtype


class LinearSpec(NamedTuple):
    """A linear layer of given formats, dtypes and shapes."""

    matmuls: LinearMatMuls
    dtypes: Dtypes
    x_shape: torch.Size  #: (..., K)
    w_shape: torch.Size  #: in the orientation of the products: (N, K), or (K, N)
    stochastic: bool

    @property
    def x_shape_TK(self) -> torch.Size:
        """(T, K)."""
        return torch.Size((math.prod(self.x_shape[:-1]), self.x_shape[-1]))

    @property
    def y_shape(self) -> torch.Size:
        """(..., N)."""
        return torch.Size((*self.x_shape[:-1], self.matmuls.output.sizes(self.x_shape_TK, self.w_shape)[1]))

    @property
    def y_shape_TN(self) -> torch.Size:
        """(T, N)."""
        return torch.Size((self.x_shape_TK[0], self.y_shape[-1]))


class GemmKernel(NamedTuple):
    """A kernel that multiplies, and the products that it supports."""

    name: str
    #: (product, the narrower dtype of a and of the result) -> whether this kernel can do it, with exact products of
    #: values. Values of a wide format are rounded to a narrow dtype first
    fits: Callable[[MatMul, torch.dtype], bool]
    #: (product, a (M, K), b (K, N), bias (N,) or None) -> (M, N) in float32, or in the operands' dtype; values come
    #: quantized, and transposed if the product says so; codes come as they were packed
    run: Callable[[MatMul, Any, Any, Tensor | None], Tensor]
    packed: bool = False  #: ``run`` takes Codes, else values
    a_dtype: torch.dtype | None = None  #: of the values that ``run`` takes; None: the dtype of the matrix
    b_dtype: torch.dtype | None = None
    #: (operand, its Codes) -> what ``run`` takes in place of the Codes; None: the Codes
    convert: Callable[[Operand, Codes], Any] | None = None


#: (x (..., K), w (N, K), bias, seed, whether to pack x) -> y (..., N), and the packed x
ForwardCall = Callable[[Tensor, Tensor, Tensor | None, int | None, bool], tuple[Tensor, Codes | None]]
#: (dy (..., N), w or None, packed x or None, seed) -> dx (..., K) of w, dw (N, K) of x, or None
BackwardCall = Callable[[Tensor, Tensor | None, Codes | None, int | None], tuple[Tensor | None, Tensor | None]]


class FusedLinear(Protocol):
    """The passes of a linear layer, of dtypes other than float64, in one call each.

    The calls check nothing. Formats must be the backend's, codes those of the Layout, and the named kernels must fit
    the products.
    """

    def forward(self, spec: LinearSpec, gemm: str) -> ForwardCall | None:
        """Return the forward with ``gemm`` for y; None: run the passes kernel by kernel."""

    def backward(self, spec: LinearSpec, gemms: tuple[str | None, str | None]) -> BackwardCall | None:
        """Return the backward with ``gemms`` for dx and dw, each None if the gradient is not needed."""


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """The arguments of attention besides q (B, H, L, D), k and v (B, H, S, D). k and v may have fewer heads than q."""

    causal: bool = False
    scale: float | None = None  #: of the scores; None: 1 / sqrt(D)
    mask: Tensor | None = None  #: bool or floating, of a shape that expands to (B, H, L, S)
    dropout: float = 0.0
    #: returns uint8 (B, H, L, S), 0 for a dropped weight, else 1. Only called if the kernels support the other options
    noise: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True, eq=False)  # a key of caches
class Backend:
    """The kernels of one kind of device. Tensors are contiguous, detached and checked, of DTYPES (masks: or bool)."""

    name: str
    #: the families whose packing widths quantize, pack and unpack support; the reference serves the others
    formats: frozenset[type[Format]]
    #: (x, format, layout, seed, dtype) -> values
    quantize: Callable[[Tensor, Format, Layout, int | None, torch.dtype], Tensor]
    #: (x, format, layout, seed) -> codes, scales
    pack: Callable[[Tensor, Format, Layout, int | None], tuple[Tensor, Tensor]]
    #: (codes, scales, format, layout, dtype) -> values (outer, rows, columns)
    unpack: Callable[[Tensor, Tensor, Format, Layout, torch.dtype], Tensor]
    #: (values (N,), low, high, nan_is_open) -> bits
    pack_mask: Callable[[Tensor, float, float, bool], Tensor]
    #: (bits, count, dtype) -> values: 0 and 1
    unpack_mask: Callable[[Tensor, int, torch.dtype], Tensor]
    #: (bits, values) -> values
    apply_mask: Callable[[Tensor, Tensor], Tensor]
    #: (bits, values, factor) -> values times the factor where the bit is 1, else times 0
    scale_mask: Callable[[Tensor, Tensor, float], Tensor]
    #: (values, bits, groups, running ranges, seed) -> codes in those ranges, which the values update first, in place;
    #: None: each group is one run with a range of its own
    affine_pack: Callable[[Tensor, int, Groups, MovingRanges | None, int | None], AffineCodes]
    #: (codes, bits, groups, N, dtype) -> values (N,)
    affine_unpack: Callable[[AffineCodes, int, Groups, int, torch.dtype], Tensor]
    #: the kernels that multiply, in order of preference. PyTorch's matmul, which fits any product, is one of them
    gemms: tuple[GemmKernel, ...]
    #: of the kernels that fit, choose the fastest by measurement (kernels/tuning.py), else the first
    tuned: bool = False
    build: str = ""  #: of compiled kernels: what tells builds apart, as another may have other times
    linear: FusedLinear | None = None  #: None: a linear layer runs kernel by kernel
    #: a context in which these kernels serve PyTorch's attention, in all threads; None: PyTorch's is as fast
    fused_attention: Callable[[], AbstractContextManager[None]] | None = None
    #: (q (B, H, L, D), k and v (B, H, S, D), options) -> the result; None if the kernels do not support these
    attention: Callable[[Tensor, Tensor, Tensor, AttentionOptions], Tensor | None] | None = None
    #: (dy, q, k, v, options, whether the mask needs a gradient) -> the gradients of q, k, v and the mask
    attention_gradients: Callable[..., tuple[Tensor, ...] | None] | None = None
    #: (float32 values, in place) -> ReLU of them, bits of the result's mask; None: PyTorch's, then ``pack_mask``
    relu: Callable[[Tensor, bool], tuple[Tensor, Tensor]] | None = None
    #: (N, p, packed) -> draws of ``Tensor.bernoulli_(p)``: bits if packed, else bytes (N,) of 0 and 1; None: PyTorch's
    bernoulli: Callable[[int, float, bool], Tensor | None] | None = None
    #: whether quantize, pack and unpack support a format of ``formats``
    supports: Callable[[Format], bool] = lambda fmt: True

    def serves(self, fmt: Format) -> bool:
        """Return whether quantize, pack and unpack support the format."""
        return fmt.packs and type(fmt) in self.formats and self.supports(fmt)
