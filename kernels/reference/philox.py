"""The random numbers of stochastic rounding: Philox, a counter-based generator, so every backend draws the same ones.

Philox4x32 with 7 rounds (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, table 2: the fewest
rounds that pass BigCrush). The key is the 64-bit seed. A row's columns are taken 128 at a time; in such a block, the
value of column ``128 * block + 16 * j + lane`` uses the counter ``(16 * block + lane, row % 2**32, row // 2**32, 0)``
and of its four output words the low (j even) or high (j odd) half of word ``j // 2``: sixteen counters side by side
fill a 512-bit register and need no shuffling.
"""

import torch
from torch import Tensor

ROUNDS = 7
BLOCK = 128
LANES = 16
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def uniform(rows: int, columns: int, seed: int, device: torch.device, first_block: int = 0) -> Tensor:
    """Uniform numbers ``(k + 1/2) / 2**16``, float64, shape (rows, columns), from a block of columns on."""
    blocks = -(-columns // BLOCK)
    counter_BL = torch.arange(first_block * LANES, (first_block + blocks) * LANES, device=device).view(1, blocks, LANES)
    row_R = torch.arange(rows, device=device).view(rows, 1, 1)
    words = philox((counter_BL, row_R & _MASK, row_R >> 32, torch.zeros_like(row_R)), seed)
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    half_RN = torch.stack([h.expand(rows, blocks, LANES) for h in halves], dim=2).reshape(rows, blocks * BLOCK)
    return (half_RN[:, :columns].double() + 0.5) / 65536


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], seed: int, rounds: int = ROUNDS) -> tuple[Tensor, ...]:
    """Four 32-bit words (in int64 tensors) for each 128-bit counter, given as four such words."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    for _ in range(rounds):
        high0, low0 = _multiply(MULTIPLIERS[0], c0)
        high1, low1 = _multiply(MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + KEY_STEPS[0]) & _MASK, (k1 + KEY_STEPS[1]) & _MASK
    return c0, c1, c2, c3


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of the product of two unsigned 32-bit numbers."""
    high = (a * (b >> 16) + ((a * (b & 0xFFFF)) >> 16)) >> 16
    return high, (a * b) & _MASK
