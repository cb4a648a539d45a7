"""Codes between a low and a step of each group."""

import itertools
from collections.abc import Iterator

import torch

from dsq.formats import BFP
from dsq.kernels.backend import AffineCodes, Backend, Groups, Running
from dsq.kernels.conformance.bits import DTYPES, differing
from dsq.kernels.conformance.codec import Case, edges
from dsq.kernels.reference.backend import REFERENCE

#: (values, groups) of affine codes: runs that tiles divide and others, several groups a tile, a short last run
_AFFINE = (
    (1, Groups(1, 1)),
    (4096, Groups(64, 8)),
    (4096, Groups(512, 8)),
    (3 * 7 * 24, Groups(24, 7)),
    (900, Groups(1, 300)),
    (5000, Groups(256, 20)),
    (20000, Groups(100, 200)),
    (16500, Groups(3, 5500)),
)


def affine_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Of affine codes: what was tried, and the operations in which ``backend`` differs from the reference ("" for
    none)."""
    for (count, groups), bits, dtype in itertools.product(_AFFINE, range(1, 9), (*DTYPES, torch.float64)):
        x, seed = edges(Case((count,), -1, BFP(4, 16), dtype)), None if bits % 3 == 0 else 2**33 + bits
        wide = torch.promote_types(dtype, torch.float32)
        before = torch.linspace(0.01, 3, 2 * groups.number, dtype=wide).view(2, -1)
        before[:, ::3] = torch.nan  # groups that no tensor was seen of
        own = bits % 2 == 0 and groups.run * groups.number >= count  # else in running ranges: values lie outside
        running = None if own else Running(before.clone(), 0.9)
        packed = REFERENCE.affine_pack(x, bits, groups, running, seed)
        y = REFERENCE.affine_unpack(packed, bits, groups, count, dtype)

        moving = None if running is None else Running(before.to(device), 0.9)
        found = backend.affine_pack(x.to(device), bits, groups, moving, seed)
        moved = AffineCodes(*(part.to(device) for part in packed))
        found_y = backend.affine_unpack(moved, bits, groups, count, dtype)
        results = [
            ("codes", packed.codes, found.codes),
            ("ranges", packed.ranges, found.ranges),
            ("unpack", y, found_y),
        ]
        if running is not None and moving is not None:
            results.append(("running ranges", running.alpha_beta, moving.alpha_beta))
        # + 0: which of its zeros is a group's smallest value is not said
        wrong = differing(*((name, expected + 0, got + 0) for name, expected, got in results))
        yield f"affine codes of {count} {dtype} in {groups}, {bits} bits, seed {seed}", " ".join(wrong)
