"""Traffic through a finite buffer: against a walk over all tiles, against SCALE-Sim's and Timeloop's published counts,
and against the lower bound of Smith et al."""

from itertools import permutations, product

import pytest

from dsq.costmodel.model.methods import BF16, Setup
from dsq.costmodel.model.operations import Gemm, Workload
from dsq.costmodel.model.tiles import ACCUMULATOR_BYTES, TiledProduct, _sizes, bytes_again
from dsq.costmodel.model.traffic import transfers
from dsq.costmodel.paper.calibrated import FIXED_32, dram
from dsq.formats import BFP
from dsq.precision import Precision

AXES = {"a": "mk", "b": "kn", "c": "mn"}


def walked(problem: TiledProduct, tile: dict[str, int], order: tuple[str, ...]) -> float:
    """Bytes that cross DRAM in a walk over the tiles, outer loop first, with one tile of each matrix in the buffer."""
    sizes = dict(zip("mkn", (problem.M, problem.K, problem.N), strict=True))
    width, crossed = dict(zip("abc", problem.dram_widths, strict=True)), 0.0
    there: dict[str, tuple[int, ...]] = {}
    summed: dict[tuple[int, ...], int] = {}  # of each tile of C, how much of K is in it

    def values(matrix: str, place: tuple[int, ...]) -> int:
        (i, rows), (j, columns) = (
            (p * tile[x], min(tile[x], sizes[x] - p * tile[x])) for p, x in zip(place, AXES[matrix], strict=True)
        )
        assert i < sizes[AXES[matrix][0]]
        assert j < sizes[AXES[matrix][1]]
        return rows * columns

    def leaves(place: tuple[int, ...]) -> float:
        return values("c", place) * (width["c"] if summed[place] == sizes["k"] else ACCUMULATOR_BYTES)

    for indices in product(*(range(-(-sizes[axis] // tile[axis])) for axis in order)):
        at = dict(zip(order, indices, strict=True))
        for matrix, axes in AXES.items():
            place = tuple(at[axis] for axis in axes)
            if there.get(matrix) == place:
                continue
            if matrix == "c":
                crossed += leaves(there["c"]) if "c" in there else 0
                crossed += values("c", place) * ACCUMULATOR_BYTES if place in summed else 0
            else:
                crossed += values(matrix, place) * width[matrix]
            there[matrix] = place
        summed[there["c"]] = summed.get(there["c"], 0) + min(tile["k"], sizes["k"] - at["k"] * tile["k"])
    return crossed + leaves(there["c"])


def fits(problem: TiledProduct, tile: dict[str, int], buffer: float) -> bool:
    a, b = (tile[x] * tile[y] * held for (x, y), held in zip(("mk", "kn"), problem.buffer_widths[:2], strict=True))
    return a + b + tile["m"] * tile["n"] * ACCUMULATOR_BYTES <= buffer


@pytest.mark.parametrize("buffer", [10, 21, 40, 64, 97, 150, 400])
@pytest.mark.parametrize(
    ("shape", "widths"),
    [((5, 7, 4), (2, 2, 2)), ((3, 8, 6), (1, 0.5, 4)), ((6, 2, 6), (2, 2, 2)), ((7, 5, 1), (2, 2, 4))],
)
def test_no_walk_over_tiles_that_fit_moves_less(shape, widths, buffer):
    problem = TiledProduct(*shape, widths, widths)
    tiles = (dict(zip("mkn", sizes, strict=True)) for sizes in product(*(range(1, size + 1) for size in shape)))
    walks = [
        walked(problem, tile, order) for tile in tiles if fits(problem, tile, buffer) for order in permutations("mkn")
    ]
    assert sum(problem.once) + bytes_again(problem, buffer) == pytest.approx(min(walks))


@pytest.mark.parametrize(
    ("m", "k", "n", "writes"), [(36, 128, 128, 147456), (9, 128, 256, 73728), (9, 256, 256, 147456)]
)
def test_scale_sims_counts_of_partial_sums(m, k, n, writes):
    """Layers 22, 24 and 26 of edgeTPU_experiment_results/edgeTPU_ws in scalesim-project/SCALE-Sim (commit 2c78b613):
    pointwise convolutions, weight stationary on 4 rows of units: each weight is read once, and outputs are written for
    each 4 of K. SCALE-Sim does not count them as read again."""
    problem = TiledProduct(m, k, n, (1, 1), (0, 0, 1))
    partial = problem.traffic("b", 1, 4, n) - m * n
    assert m * n + partial / (2 * ACCUMULATOR_BYTES) == writes


def test_timeloops_counts_of_a_tiled_product():
    """8 x 8 x 8 with B and Z in the buffer, N in 4 tiles: 512 reads of A, 64 of B, 64 results (Accelergy-Project/
    timeloop-accelergy-exercises, sparseloop/02.2.2-spMspM-tiled, "algorithmic" counts of the backing storage)."""
    counts = [TiledProduct(8, 8, 8, (1, 1), moved).traffic("c", 8, 8, 1) for moved in ((1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert counts == [512, 64, 64]


@pytest.mark.parametrize("values", [1 << 12, 1 << 16, 1 << 20])
@pytest.mark.parametrize("shape", [(4096, 4096, 4096), (2048, 8192, 2048), (512, 50000, 768)])
def test_traffic_is_near_the_lower_bound(shape, values):
    """2 M N K / sqrt(S) - 2 S (Smith, Lowery, Langou, van de Geijn, 2019, arXiv:1702.02017), of values of 4 bytes."""
    m, k, n = shape
    problem = TiledProduct(*shape, (4, 4), (4, 4, 4))
    moved = (sum(problem.once) + bytes_again(problem, 4 * values)) / 4
    bound = 2 * m * n * k / values**0.5 - 2 * values
    assert bound <= moved <= 1.1 * max(bound, 0) + 2 * (m * k + k * n + m * n)


def test_a_step_moves_again_what_its_products_do():
    gemm, setup = Gemm("l", 64, 96, 80), Setup(BFP(32), Precision(8, 4, 6, 16))
    workload = Workload("one", (gemm,), 64)
    again = {t.tensor: t.bytes for t in transfers(workload, setup, 2000)[len(transfers(workload, setup)) :]}
    stash = 4.5 / 8  # bytes of a value, with the exponents of its blocks
    expected = {
        "forward again": TiledProduct(64, 96, 80, (2, 2), (2, 2, 2)),
        "dx again": TiledProduct(64, 80, 96, (2, 2), (2, 2, 2)),
        "dw again": TiledProduct(80, 64, 96, (2, stash), (2, stash, 4)),
    }
    assert again == {
        name: round(bytes_again(one, 2000)) > 0 and round(bytes_again(one, 2000)) for name, one in expected.items()
    }
    assert sum(t.bytes for t in transfers(workload, setup, 1e6)) == sum(t.bytes for t in transfers(workload, setup))
    with pytest.raises(ValueError, match="buffer must hold a value of each operand and an accumulator, got 7 bytes"):
        transfers(workload, BF16, 7)


def test_scores_on_chip_move_nothing_but_keys_are_read_again():
    """Fused attention keeps a tile of queries, and reads all keys for each."""
    scores = Gemm("scores", 512, 64, 512, batch=3, weight=False, quantized=False, on_chip="y")
    buffer = 64 * (64 * 2 + 4) + 64 * 2  # 64 queries with their scores of a key, and the key
    (forward, *_) = (t for t in transfers(Workload("one", (scores,), 512), BF16, buffer) if t.tensor == "forward again")
    assert forward.bytes == 3 * (512 / 64 - 1) * 512 * 64 * 2


def test_low_bits_gain_more_through_a_small_buffer():
    """The paper's accounting: larger tiles fit, and each is fetched less often."""
    workload = Workload("one", (Gemm("l", 2048, 2048, 2048),), 2048)
    low = Setup(BFP(32), Precision(2, 2, 2, 16))
    assert dram(workload, low, 1e9) == dram(workload, low) > 1.5 * dram(workload, low, 256e3)
    assert dram(workload, FIXED_32, 256e3) == 1


@pytest.mark.parametrize("size", [1, 7, 60, 97])
def test_some_tile_is_the_smallest_of_each_count_of_tiles(size):
    smallest = {-(-size // tile): tile for tile in range(size, 0, -1)}
    assert set(smallest.values()) <= _sizes(size) <= set(range(1, size + 1))
