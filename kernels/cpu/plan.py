"""Plans of the native kernels (struct Plan of native/job.h): all of a call but its memory and its seed."""

import ctypes

import torch

from .grid import BIAS, Grid, Layout

SEED_MASK = (1 << 64) - 1
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class Plan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("outer", "rows", "columns", "row_bytes")),
        *((name, ctypes.c_int32) for name in ("along_rows", "bits", "box", "exponent")),
        *((name, ctypes.c_int32) for name in ("dtype", "out_dtype", "stochastic", "isa")),
    )


def plan(grid: Grid, layout: Layout, dtype: torch.dtype, out_dtype: torch.dtype, stochastic: bool, isa: int) -> Plan:
    """``isa`` is an index of dsq_isa."""
    return Plan(
        *(layout.outer, layout.rows, layout.columns, layout.code_shape(grid.bits)[1]),
        *(layout.along_rows, grid.bits, grid.box, -1 if grid.exponent is None else grid.exponent + BIAS),
        *(DTYPES[dtype], DTYPES[out_dtype], stochastic, isa),
    )
