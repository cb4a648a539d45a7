"""Products by the native kernels, each in one call (native/product.cpp).

For a small layer separate calls cost more than their work. What lies between the kernels stays in memory that is kept.
"""

import ctypes
import math
import threading
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor

from .grid import Grid, Layout
from .native_plan import SEED_MASK, Plan, plan
from .product import Codes, Factor, OneCall, Product

_ALIGNMENT = 64
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
        ("box", ctypes.c_int32),
    )


def scratch(size: int) -> Tensor:
    """``size`` bytes or more, the same as in this thread's last call unless they are many."""
    if size > _KEPT:
        return torch.empty(size, dtype=torch.uint8, device="cpu")
    kept = getattr(_thread, "scratch", None)
    if kept is None or kept.numel() < size:
        kept = _thread.scratch = torch.empty(size, dtype=torch.uint8, device="cpu")
    return kept


class _Room:
    """Hands out the scratch memory of a call, piece by piece."""

    used = 0

    def take(self, size: int) -> int:
        at = self.used
        self.used += -(-size // _ALIGNMENT) * _ALIGNMENT
        return at


def product_on(library: ctypes.CDLL, isa: int) -> OneCall:
    """The products of ``library``, with the kernels of instruction set ``isa`` for what goes on around the GEMM."""
    run, threads = library.dsq_product, torch.get_num_threads

    @lru_cache(maxsize=4096)
    def prepared(
        product: Product, on_codes: bool, a_shape: torch.Size, b_shape: torch.Size, packed: bool, stochastic: bool
    ) -> tuple[int, int, int, int, _Product]:
        """Address of the struct, bytes of scratch, rows and columns of the result; and the struct, kept alive."""
        room, plans = _Room(), partial(plan, stochastic=stochastic, isa=isa)
        made = _Product(
            _factor(product.a, a_shape, on_codes, False, room, plans),
            _factor(product.b, b_shape, on_codes, packed, room, plans),
        )
        a_axis, b_axis = product.contracted()
        made.a.across, made.b.across = a_axis == 0, b_axis == 0
        made.rows, made.depth = a_shape[1 - a_axis], a_shape[a_axis]
        made.columns = b_shape[1 - b_axis]
        sizes = made.rows, made.columns, made.depth
        if on_codes:
            made.box = summed_as_integers(made.a.plan.box)
            made.panels_at = room.take(library.dsq_gemm_boxes_scratch(*sizes, made.box))
        else:
            made.panels_at = room.take(library.dsq_gemm_bf16_scratch(*sizes))
        if product.result is not None:
            layout = Layout(1, made.rows, made.columns, along_rows=False)
            made.result = plans(product.result, layout, torch.float32, torch.float32)
            made.result_seed = product.result_seed
        return ctypes.addressof(made), room.used, made.rows, made.columns, made

    def multiply(
        product: Product, on_codes: bool, a: Tensor, b: Tensor | Codes, bias: Tensor | None, seed: int | None
    ) -> Tensor:
        b_values, b_exponents = (b.codes, b.exponents.data_ptr()) if isinstance(b, Codes) else (b.contiguous(), None)
        address, room, rows, columns, _ = prepared(
            product, on_codes, a.shape, b.shape, b_exponents is not None, seed is not None
        )
        a, out, memory = a.contiguous(), torch.empty(rows, columns, dtype=torch.float32, device="cpu"), scratch(room)
        bias = bias if bias is None else bias.contiguous()
        bias_at = None if bias is None else bias.data_ptr()
        operands = (a.data_ptr(), b_values.data_ptr(), b_exponents, bias_at, out.data_ptr(), memory.data_ptr())
        run(address, *operands, threads(), (seed or 0) & SEED_MASK)
        return out

    return multiply


def _factor(
    factor: Factor,
    shape: torch.Size,
    on_codes: bool,
    packed: bool,
    room: _Room,
    plans: Callable[[Grid, Layout, torch.dtype, torch.dtype], Plan],
) -> _Factor:
    assert factor.grid is not None
    layout = Layout.of(shape, factor.dim)
    made = _Factor(plans(factor.grid, layout, torch.bfloat16 if packed else torch.float32, torch.bfloat16))
    made.seed, made.packed = factor.seed, packed
    made.row_stride, made.column_stride = shape[1], 1
    if not on_codes:
        made.at = room.take(2 * shape.numel())
    elif not packed:
        made.at = room.take(math.prod(layout.code_shape(factor.grid.bits)))
        made.exponents_at = room.take(math.prod(layout.exponent_shape(factor.grid.box)))
    if factor.transposed:
        made.row_stride, made.column_stride = made.column_stride, made.row_stride
    return made
