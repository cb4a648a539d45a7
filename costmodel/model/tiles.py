"""DRAM traffic of a matrix product whose tiles lie in a finite buffer on the chip.

C_MN = A_MK B_KN runs in tiles of m x k x n values. The buffer holds a tile of each matrix, C's in accumulators. The
innermost loop over tiles decides which tile stays, and so which matrix moves once; the others are fetched again
(Timeloop, Parashar et al., 2019; SCALE-Sim, Samajdar et al., 2020). With A, B, C the bytes of a matrix that moves once:

    output stationary   A ceil(N / n) + B ceil(M / m) + C
    weight stationary   A ceil(N / n) + B             + C + 8 M N (ceil(K / k) - 1)
    input stationary    A             + B ceil(M / m) + C + 8 M N (ceil(K / k) - 1)

The last term is partial sums, written and read again. No schedule moves fewer than 2 M N K / sqrt(S) - 2 S values
through a buffer of S (Smith et al., 2019).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import isqrt

ACCUMULATOR_BYTES = 4


@dataclass(frozen=True)
class TiledProduct:
    """A product, with the bytes of a value of A, B and C."""

    M: int
    K: int
    N: int
    buffer_widths: tuple[float, ...]  #: in the buffer; C is accumulated there in ACCUMULATOR_BYTES
    dram_widths: tuple[float, ...]  #: in DRAM; 0: the matrix never leaves the chip

    @property
    def once(self) -> tuple[float, ...]:
        """Bytes of A, B and C."""
        a, b, c = self.dram_widths
        return self.M * self.K * a, self.K * self.N * b, self.M * self.N * c

    def traffic(self, stationary: str, m: int, k: int, n: int) -> float:
        """Return the bytes that cross DRAM with tiles of m x k x n, of which "a", "b" or "c" stays."""
        a, b, c = self.once
        spills = 0 if stationary == "c" else 2 * ACCUMULATOR_BYTES * self.M * self.N * (-(-self.K // k) - 1)
        a *= 1 if stationary == "a" else -(-self.N // n)
        b *= 1 if stationary == "b" else -(-self.M // m)
        return a + b + c + spills


@lru_cache(maxsize=4096)
def bytes_again(product: TiledProduct, buffer: float) -> float:
    """Return the least bytes that tiles move beside each matrix once: fetched again, or partial sums. Raises ValueError
    where no tile fits in ``buffer`` bytes."""
    least = min((product.traffic(*tiling) for tiling in _tilings(product, buffer)), default=None)
    if least is None:
        raise ValueError(f"buffer must hold a value of each operand and an accumulator, got {buffer:g} bytes")
    return least - sum(product.once)


def _tilings(product: TiledProduct, buffer: float) -> Iterator[tuple[str, int, int, int]]:
    """Yield the stationary matrix and its largest tiles that fit, beside slices of the others one value thick."""
    a, b, c = *product.buffer_widths[:2], ACCUMULATOR_BYTES
    for m in _sizes(product.M):
        if (n := int((buffer - m * a) // (m * c + b))) > 0:
            yield "c", m, 1, min(n, product.N)
        if (k := int((buffer - m * c) // (m * a + b))) > 0:
            yield "a", m, min(k, product.K), 1
    for n in _sizes(product.N):
        if (k := int((buffer - n * c) // (n * b + a))) > 0:
            yield "b", 1, min(k, product.K), n


def _sizes(size: int) -> set[int]:
    """Return the sizes of a tile for which no smaller one makes as few tiles."""
    root = isqrt(size) + 1
    return {-(-size // count) for count in range(1, root + 1)} | set(range(1, min(root, size) + 1))
