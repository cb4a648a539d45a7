"""The formats with a signed scale against block floating point: the kernels at 4 bits, and a training step."""

from collections.abc import Iterator

import torch

from analysis.bench.kernels import instruction_sets, main_operations
from analysis.bench.step import BATCH, LENGTH, WIDTH, converted, inside
from analysis.models import encoder
from analysis.timing import Call, Race, keep_freed_memory, race
from dsq.formats import BFP, SignedBFP, SignedNVInt

KINDS = (BFP, SignedBFP, SignedNVInt)
#: values: in cache, and beyond
SIZES = (1 << 18, 1 << 20, 1 << 24)
PRECISIONS = ("[4,4,4,16]", "[4,4,4,8]")


def races(rounds: int) -> Iterator[Race]:
    """One of each operation and size, and of the step at each precision. Raises ValueError without the kernels."""
    best = instruction_sets()[0]
    torch.manual_seed(0)
    for size in SIZES:
        x = torch.randn(size // 512, 512)
        y = torch.empty_like(x)
        calls = {kind.name: main_operations(best, x, y, kind(4)) for kind in KINDS}
        for operation in calls["bfp"]:
            of_each = {name: operations[operation] for name, operations in calls.items()}
            yield _race(f"{operation}, {size:,} float32 values", of_each, rounds)
    keep_freed_memory()
    model, x = encoder(sdpa=True), torch.randn(BATCH, LENGTH, WIDTH)
    for levels in PRECISIONS:
        steps = {kind.name: inside(converted(model, levels=levels, format=kind.name), x) for kind in KINDS}
        yield _race(f"step of {levels}, six blocks, d {WIDTH}, {BATCH * LENGTH} tokens", steps, rounds)


def _race(what: str, calls: dict[str, Call], rounds: int) -> Race:
    return race(f"{what}, {torch.get_num_threads()} threads", ("bfp", calls.pop("bfp")), calls, rounds)
