"""Gradient norms of every sample of the data set, from the last time it was seen (WTA-CRS, algorithm 1's Cache).

One number a layer and a sample: the root mean square, over the sample's tokens, of ||dZ_i||. The mean and not the sum,
so that a sample padded to another length next epoch keeps its number. The cache lives in CPU memory; what a backward
computes on a GPU is fetched in one transfer a step, not one a layer.
"""

from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


class NormCache:
    """Norms by layer and sample id; ids are any integers."""

    def __init__(self) -> None:
        self.slot_of: dict[int, int] = {}  # sample id -> its column in every layer's norms
        self.norms: dict[str, Tensor] = {}  # layer -> float32, NaN where the sample is unseen
        self.batch: Tensor | None = None  # columns of the samples of the current batch, in batch order
        self._pending: list[tuple[str, Tensor, Tensor]] = []

    def start_batch(self, ids: Iterable[int] | Tensor | None) -> None:
        """Say which samples the next forwards see, in batch order; None: unknown.

        Raises TypeError where ids are not integers, ValueError for a tensor that is not one-dimensional.
        """
        self._flush()
        if ids is None:
            self.batch = None
            return
        if isinstance(ids, Tensor):
            if ids.dim() != 1:
                raise ValueError(f"ids must be one-dimensional, got a tensor of shape {tuple(ids.shape)}")
            ids = ids.tolist()
        ids = list(ids)
        wrong = [i for i in ids if isinstance(i, bool) or not isinstance(i, Integral)]
        if wrong:
            raise TypeError(f"ids must be integers, one a sample of the batch, got {wrong[0]!r}")
        slots = [self.slot_of.setdefault(int(i), len(self.slot_of)) for i in ids]
        self.batch = torch.tensor(slots, dtype=torch.int64, device="cpu")

    def lookup(self, layer: str, device: torch.device) -> Tensor | None:
        """Cached norms of the current batch, an unseen sample's the mean of the others; None where all are unseen."""
        self._flush()
        if self.batch is None or layer not in self.norms:
            return None
        norms_B = self._grown(layer)[self.batch]
        if norms_B.isnan().all():
            return None
        return norms_B.nan_to_num(norms_B.nanmean().item()).to(device, non_blocking=True)

    def record(self, layer: str, batch: Tensor, norms_B: Tensor) -> None:
        """Remember this step's norms of the samples in columns ``batch``. Non-finite ones are dropped."""
        self._pending.append((layer, batch, norms_B))

    def state_dict(self) -> dict[str, Any]:
        self._flush()
        ids = torch.tensor(list(self.slot_of), dtype=torch.int64, device="cpu")
        return {"ids": ids, "norms": {layer: self._grown(layer)[: ids.numel()].clone() for layer in self.norms}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._pending.clear()
        self.batch = None
        self.slot_of = {i: slot for slot, i in enumerate(state["ids"].tolist())}
        self.norms = {layer: norms.clone() for layer, norms in state["norms"].items()}

    def _grown(self, layer: str) -> Tensor:
        """The layer's norms, a column for every sample named so far and spare ones, so that growing copies little."""
        known = self.norms.get(layer, torch.empty(0, device="cpu"))
        if known.numel() < len(self.slot_of):
            more = max(len(self.slot_of), 2 * known.numel()) - known.numel()
            spare = torch.full((more,), torch.nan, device="cpu")
            self.norms[layer] = known = torch.cat((known, spare))
        return known

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        for device in {norms_B.device for _, _, norms_B in pending}:
            here = [entry for entry in pending if entry[2].device == device]
            fetched = torch.cat([norms_B for _, _, norms_B in here]).cpu().split([b.numel() for _, b, _ in here])
            for (layer, batch, _), norms_B in zip(here, fetched, strict=True):
                finite_B = norms_B.isfinite()
                self._grown(layer)[batch[finite_B]] = norms_B[finite_B]
