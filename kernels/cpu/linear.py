"""The passes of a linear layer by the native kernels, each in one call (native/layer.cpp).

For a small layer separate calls cost more than their work. What lies between the kernels stays in memory that is kept.
"""

import ctypes
import math
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from .grid import Layout
from .native_plan import SEED_MASK, Plan, plan
from .product import Codes, Factor, Product, Products, Way

_ALIGNMENT = 64
_WAYS: tuple[Way, ...] = ("codes", "bfloat16", "float32")  #: enum Way of layer.cpp
#: scratch memory up to this size is kept from call to call: fresh pages cost more than filling them
_KEPT = 64 << 20
_thread = threading.local()


def summed_as_integers(box: int) -> int:
    """Values of a dot product summed as integers: a box, or some number where one exponent serves the tensor (0)."""
    return box or 16


class _Factor(ctypes.Structure):
    _fields_ = (
        ("plan", Plan),
        *((name, ctypes.c_int64) for name in ("at", "exponents_at", "row_stride", "column_stride")),
        *(("seed", ctypes.c_uint64), ("packed", ctypes.c_int32), ("across", ctypes.c_int32)),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        *(("a", _Factor), ("b", _Factor), ("result", Plan), ("result_seed", ctypes.c_uint64)),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "depth", "panels_at")),
        *(("way", ctypes.c_int32), ("box", ctypes.c_int32)),
    )


class _Forward(ctypes.Structure):
    _fields_ = (("output", _Product), ("stash", Plan), ("stash_seed", ctypes.c_uint64))


class _Backward(ctypes.Structure):
    _fields_ = (("input_gradient", _Product), ("weight_gradient", _Product))


def scratch(size: int) -> Tensor:
    """``size`` bytes or more.

    The thread's own memory, which its next call writes over; above _KEPT, new memory, which the caller must hold until
    the kernel is done with it.
    """
    if size > _KEPT:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    kept = getattr(_thread, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _thread.scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
    return kept


class _Room:
    """Hands out the scratch memory of a product, piece by piece."""

    used = 0

    def take(self, size: int) -> int:
        at = self.used
        self.used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return at


#: (x (..., K), w (N, K), bias, seed, whether to pack x) -> y (..., N), in float32, and the packed x
ForwardCall = Callable[[Tensor, Tensor, Tensor | None, int | None, bool], tuple[Tensor, Codes | None]]
#: (dy (..., N), w or None, packed x or None, seed) -> dx (..., K) of w, dw (N, K) of x, or None
BackwardCall = Callable[[Tensor, Tensor | None, Codes | None, int | None], tuple[Tensor | None, Tensor | None]]


class NativeLayer:
    """The passes of a linear layer by ``library``, each in one call that is made for given shapes.

    The kernels around the GEMMs are those of instruction set ``isa``. The calls trust their caller: factors are
    float32, codes those of the Layout, the ways those that gemm.py has units for, and operands of other shapes are read
    all the same.
    """

    def __init__(self, library: ctypes.CDLL, isa: int) -> None:
        self._library, self._isa = library, isa

    def forward(
        self, products: Products, way: Way, x_shape: torch.Size, w_shape: torch.Size, stochastic: bool
    ) -> ForwardCall:
        """``way`` is not split; of "float32", which torch multiplies in the end, the result has no grid."""
        shape_TK, stash = _matrix(x_shape), products.stash
        output, room = self._product(products.output, way, shape_TK, w_shape, False, stochastic)
        made, code_shape, exponent_shape = _Forward(output), (), ()
        if stash.grid is not None:
            layout = Layout.of(shape_TK, stash.dim)
            made.stash = plan(stash.grid, layout, torch.float32, torch.float32, stochastic, self._isa)
            made.stash_seed = stash.seed
            code_shape, exponent_shape = layout.code_shape(stash.grid.bits), layout.exponent_shape(stash.grid.box)
        sizes, by_torch = (*x_shape[:-1], w_shape[0]), way == "float32"
        run, threads, plans = self._library.dsq_layer_forward, torch.get_num_threads, ctypes.byref(made)

        def call(
            x: Tensor, w: Tensor, bias: Tensor | None, seed: int | None, packing: bool
        ) -> tuple[Tensor, Codes | None]:
            x, w, bias = x.contiguous(), w.contiguous(), None if bias is None else bias.contiguous()
            y = torch.empty(*sizes, dtype=torch.float32, device="cpu")  # whatever the defaults are
            # values of float32 are many: what holds them is given back, for the stash to have
            memory = torch.empty(room // 4, dtype=torch.float32, device="cpu") if by_torch else scratch(room)
            packed = codes_at = exponents_at = None
            if packing:
                codes = torch.empty(*code_shape, dtype=torch.uint8, device="cpu")
                exponents = torch.empty(*exponent_shape, dtype=torch.uint8, device="cpu")
                packed = Codes(codes, exponents, shape_TK)
                codes_at, exponents_at = codes.data_ptr(), exponents.data_ptr()
            run(
                *(plans, x.data_ptr(), w.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr()),
                *(codes_at, exponents_at, memory.data_ptr(), threads(), (seed or 0) & SEED_MASK),
            )
            if by_torch:
                depth = shape_TK[1]
                x0_TK = memory.as_strided(shape_TK, (depth, 1), output.a.at // 4)
                w0_KN = memory.as_strided((depth, w_shape[0]), (1, depth), output.b.at // 4)
                y_TN = y.view(shape_TK[0], w_shape[0])
                if bias is None:
                    torch.mm(x0_TK, w0_KN, out=y_TN)
                else:
                    torch.addmm(bias, x0_TK, w0_KN, out=y_TN)
            return y, packed

        return call

    def backward(
        self,
        products: Products,
        ways: tuple[Way, Way],
        dy_shape: torch.Size,
        w_shape: torch.Size | None,
        x_shape: torch.Size | None,
        stochastic: bool,
    ) -> BackwardCall:
        """``ways`` (of dx, of dw) are "codes" or "bfloat16". What is not used is None, as is its shape."""
        shape_TN = _matrix(dy_shape)
        made, room, dx_shape, dw_shape = _Backward(), 0, (), ()
        if w_shape is not None:
            made.input_gradient, room = self._product(
                products.input_gradient, ways[0], shape_TN, w_shape, False, stochastic
            )
            dx_shape = (*dy_shape[:-1], w_shape[1])
        if x_shape is not None:
            made.weight_gradient, more = self._product(
                products.weight_gradient, ways[1], shape_TN, x_shape, True, stochastic
            )
            room, dw_shape = max(room, more), (shape_TN[1], x_shape[1])
        run, threads, plans = self._library.dsq_layer_backward, torch.get_num_threads, ctypes.byref(made)

        def call(
            dy: Tensor, w: Tensor | None, x: Codes | None, seed: int | None
        ) -> tuple[Tensor | None, Tensor | None]:
            dy, memory = dy.contiguous(), scratch(room)
            dx = dw = w_at = dx_at = codes_at = exponents_at = dw_at = None
            if w is not None:
                w, dx = w.contiguous(), torch.empty(*dx_shape, dtype=torch.float32, device="cpu")
                w_at, dx_at = w.data_ptr(), dx.data_ptr()
            if x is not None:
                codes, exponents = x.codes.contiguous(), x.exponents.contiguous()  # hooks may have changed their order
                dw = torch.empty(*dw_shape, dtype=torch.float32, device="cpu")
                codes_at, exponents_at, dw_at = codes.data_ptr(), exponents.data_ptr(), dw.data_ptr()
            run(
                *(plans, dy.data_ptr(), w_at, codes_at, exponents_at, dx_at, dw_at),
                *(memory.data_ptr(), threads(), (seed or 0) & SEED_MASK),
            )
            return dx, dw

        return call

    def _product(
        self,
        product: Product,
        way: Way,
        a_shape: torch.Size,
        b_shape: torch.Size,
        packed: bool,
        stochastic: bool,
    ) -> tuple[_Product, int]:
        """The struct, and the bytes of scratch memory that it wants; ``packed`` says whether b comes in codes."""
        room = _Room()
        made = _Product(
            self._factor(product.a, a_shape, way, False, room, stochastic),
            self._factor(product.b, b_shape, way, packed, room, stochastic),
            way=_WAYS.index(way),
        )
        a_axis, b_axis = product.contracted()
        made.a.across, made.b.across = a_axis == 0, b_axis == 0
        made.rows, made.depth = a_shape[1 - a_axis], a_shape[a_axis]
        made.columns = b_shape[1 - b_axis]
        sizes = made.rows, made.columns, made.depth
        if way == "codes":
            made.box = summed_as_integers(made.a.plan.box)
            made.panels_at = room.take(self._library.dsq_gemm_boxes_scratch(*sizes, made.box))
        elif way == "bfloat16":
            made.panels_at = room.take(self._library.dsq_gemm_bf16_scratch(*sizes))
        if product.result is not None:
            layout = Layout(1, made.rows, made.columns, along_rows=False)
            made.result = plan(product.result, layout, torch.float32, torch.float32, stochastic, self._isa)
            made.result_seed = product.result_seed
        return made, room.used

    def _factor(
        self, factor: Factor, shape: torch.Size, way: Way, packed: bool, room: _Room, stochastic: bool
    ) -> _Factor:
        assert factor.grid is not None
        layout = Layout.of(shape, factor.dim)
        written = torch.float32 if way == "float32" else torch.bfloat16
        made = _Factor(plan(factor.grid, layout, written if packed else torch.float32, written, stochastic, self._isa))
        made.seed, made.packed = factor.seed, packed
        made.row_stride, made.column_stride = shape[1], 1
        if way != "codes":
            made.at = room.take(written.itemsize * shape.numel())
        elif not packed:
            made.at = room.take(math.prod(layout.code_shape(factor.grid.bits)))
            made.exponents_at = room.take(math.prod(layout.exponent_shape(factor.grid.box)))
        if factor.transposed:
            made.row_stride, made.column_stride = made.column_stride, made.row_stride
        return made


def _matrix(shape: torch.Size) -> torch.Size:
    """(..., N) as (T, N)."""
    return torch.Size((math.prod(shape[:-1]), shape[-1]))
