"""The rows of an activation kept for the weight gradient, shared by all layers that read the same activation.

Shapes: T tokens (all leading dimensions), K in-features, k kept rows, B samples.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dsq.stash.storages import StorageCache, storage_key, weak
from dsq.stash.wtacrs.norm_cache import NormCache
from dsq.stash.wtacrs.sampling import budget, probabilities, sample_rows


@dataclass(frozen=True)
class Tokens:
    """How the T rows of an activation, row-major over ``lead``, belong to samples: along ``lead[sample_dim]``."""

    lead: tuple[int, ...]
    sample_dim: int

    def samples(self) -> int:
        return self.lead[self.sample_dim] if -len(self.lead) <= self.sample_dim < len(self.lead) else 0

    def spread(self, values_B: Tensor) -> Tensor:
        """A value a sample -> a value a token (T)."""
        shape = [1] * len(self.lead)
        shape[self.sample_dim] = values_B.numel()
        return values_B.view(shape).expand(self.lead).reshape(-1)

    def mean_square(self, norms_T: Tensor) -> Tensor:
        """A norm a token -> the mean square over each sample's tokens (B)."""
        return norms_T.view(self.lead).square().movedim(self.sample_dim, 0).reshape(self.samples(), -1).mean(1)


def index_of(rows_k: Tensor, scale_k: Tensor) -> Tensor:
    """Row numbers and the bits of their float32 scales, as one int32 tensor (2, ..., k)."""
    return torch.stack((rows_k.int(), scale_k.view(torch.int32)))


def scales_of(index_2k: Tensor) -> Tensor:
    """The scales in what index_of gave."""
    return index_2k[1].view(torch.float32)


@dataclass(eq=False)
class RowSample:
    """One draw of rows, open to further layers until its activation is gone, or the model's forward is over.

    The graph holds it (each layer's node does) and the sampler refers to it weakly: it dies with its graph. While open
    it holds the rows, so that a stash policy codes one live tensor for q, k and v.
    """

    leader: str  #: the layer under whose name the samples' gradient norms are cached
    batch: Tensor | None  #: cache columns of the samples of the batch
    rows: Tensor | None  #: (k, K)
    index: Tensor | None  #: index_of the rows
    squares: dict[str, Tensor] = field(default_factory=dict)  #: reader -> mean square of ||dZ|| of each sample
    readers: set[str] = field(default_factory=set)

    def close(self) -> None:
        self.rows = self.index = None


@dataclass
class Tally:
    """What the latest training forward sampled."""

    tokens: int = 0  #: rows drawn from
    kept: int = 0  #: rows
    draws: int = 0
    readers: int = 0  #: linears that read a draw's rows
    cached: int = 0  #: draws whose probabilities used cached gradient norms
    products: int = 0  #: operands of products of two activations that were sampled
    exact: int = 0  #: linears with no more tokens than the budget, kept whole
    raw_bytes: int = 0
    kept_bytes: int = 0


class RowSampler:
    """Draws rows at budget ratio * T from its own random numbers, and shares the draws."""

    def __init__(self, ratio: float, seed: int) -> None:
        self.ratio = ratio
        self.cache = NormCache()
        self.generator = torch.Generator().manual_seed(seed)
        self.tally = Tally()
        self._shared: StorageCache[RowSample] = StorageCache()

    def sample(self, x: Tensor, dtype: torch.dtype, reader: str, tokens: Tokens) -> RowSample:
        """The kept rows of ``x``, in ``dtype``: of an open sample of the same memory in the same state, or a new draw.

        A layer that reads an activation again (a second forward on the same input) gets a new draw.
        """
        self.close(expired=True)
        # a contiguous activation is the same one however its tokens are grouped
        rows = x.shape[-1:] if x.is_contiguous() else (x.shape, x.stride())
        key = (*storage_key(x), x.storage_offset(), x.numel(), rows, dtype)
        sample = self._shared.get(key)
        if sample is None or sample.rows is None or reader in sample.readers:
            sample = self._draw(x, dtype, reader, tokens)
            self._shared.put(key, sample, weak(x))
        sample.readers.add(reader)
        self.tally.readers += 1
        return sample

    def close(self, expired: bool = False) -> None:
        """Close all samples, or those whose activation is gone: then only what autograd saved of them is kept."""
        for sample in self._shared.pop_all(expired):
            sample.close()

    def _draw(self, x: Tensor, dtype: torch.dtype, leader: str, tokens: Tokens) -> RowSample:
        h_TK = x.reshape(-1, x.shape[-1])
        k = budget(len(h_TK), self.ratio)
        batch = self.cache.batch
        if batch is not None and tokens.samples() != batch.numel():
            batch = None
        norms_B = None if batch is None else self.cache.lookup(leader, x.device)
        h_norm_T = torch.linalg.vector_norm(h_TK, dim=1, dtype=torch.promote_types(x.dtype, torch.float32))
        p_T = probabilities(h_norm_T, None if norms_B is None else tokens.spread(norms_B))
        rows_k, scale_k = sample_rows(p_T, k, self.uniform(x.device, k))
        h_kK = h_TK.index_select(0, rows_k).to(dtype)
        index_2k = index_of(rows_k, scale_k)

        tally = self.tally
        tally.draws += 1
        tally.cached += norms_B is not None
        tally.tokens += len(h_TK)
        tally.kept += k
        tally.raw_bytes += h_TK.numel() * dtype.itemsize
        tally.kept_bytes += h_kK.nbytes + index_2k.nbytes
        return RowSample(leader, batch, h_kK, index_2k)

    def uniform(self, device: torch.device, *shape: int) -> Tensor:
        """Random numbers of [0, 1) in float64: the policy's next ones, the same for every device."""
        drawn = torch.rand(shape, generator=self.generator, dtype=torch.float64, device="cpu")
        return drawn.to(device, non_blocking=True)

    def record(self, sample: RowSample, reader: str, dz_norm_T: Tensor, tokens: Tokens) -> None:
        """Cache a reader's gradient norms. Rows with several readers serve the sum of squares: of the variances."""
        if sample.batch is None or tokens.samples() != sample.batch.numel():
            return
        sample.squares[reader] = tokens.mean_square(dz_norm_T)
        self.cache.record(sample.leader, sample.batch, torch.stack(list(sample.squares.values())).sum(0).sqrt())
