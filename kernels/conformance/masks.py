"""Masks of one bit a value."""

import math
from collections.abc import Iterator

import torch

from dsq.formats import BFP
from dsq.kernels.backend import Backend
from dsq.kernels.conformance.bits import DTYPES, differing
from dsq.kernels.conformance.codec import Case, edges
from dsq.kernels.reference.backend import REFERENCE


def mask_disagreements(backend: Backend, device: torch.device) -> Iterator[tuple[str, str]]:
    """Of masks: what was tried, and the operations in which ``backend`` differs from the reference ("" for none)."""
    for dtype in (*DTYPES, torch.float64, torch.bool):
        for count in (0, 1, 8, 31, 2048, 4100):
            x = edges(Case((count,), -1, BFP(4, 16), torch.float32 if dtype is torch.bool else dtype)).to(dtype)
            for low, high, nan_is_open in ((0.0, math.nan, True), (-0.1, 0.1, False), (-math.inf, 0.0, True)):
                bits = REFERENCE.pack_mask(x, low, high, nan_is_open)
                found = backend.pack_mask(x.to(device), low, high, nan_is_open)
                y = REFERENCE.unpack_mask(bits, count, low, 1 / 0.9, dtype)
                found_y = backend.unpack_mask(bits.to(device), count, low, 1 / 0.9, dtype)
                pairs = [("pack", bits, found), ("unpack", y, found_y)]
                if dtype is not torch.bool:
                    found_x = backend.apply_mask(bits.to(device), x.to(device))
                    pairs.append(("apply", REFERENCE.apply_mask(bits, x), found_x))
                yield f"mask of {count} {dtype} between {low} and {high}", " ".join(differing(*pairs))
