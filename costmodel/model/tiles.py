"""Cache reuse: how often a matrix product reads its operands from DRAM.

Stated model: output-stationary square tiles. Half the on-chip memory S (bytes) holds a t x t tile of fp32 sums, the
other half streams the operands, so t = floor(sqrt(S / 8)). Each row of tiles streams the second operand once, each
column of tiles the first. Widths play no part: sums are fp32 in every precision.
"""

import math

ACCUMULATOR_BYTES = 4


def tile_edge(on_chip_bytes: float) -> int:
    """t = floor(sqrt(S / 2 / 4)), at least 1. An infinite S reads each operand once."""
    return 2**62 if math.isinf(on_chip_bytes) else max(1, math.isqrt(int(on_chip_bytes) // (2 * ACCUMULATOR_BYTES)))


def reads(other_dimension: int, edge: int) -> int:
    """How often an operand is read: once for every tile along the output dimension it does not have."""
    return -(-other_dimension // edge)
