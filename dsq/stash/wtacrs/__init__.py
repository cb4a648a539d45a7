"""WTA-CRS: linears keep a sample of their input's rows for the weight gradient (Liu et al., 2023, arXiv 2305.15265).

sampling.py   which rows, at which scale: the estimator
rows.py       one draw for all layers that read one activation; gradient norms of each sample of the data set
layers.py     linear layers, products of two activations (an option)

What the paper leaves open, and our choice:
- A row's scale stays beside it until the backward. Scaling in the forward (algorithm 2) would spread the magnitudes of
  the kept rows, and cost precision where another policy packs them.
- Norms are cached a sample, as in the paper, so the tokens of a sample share one; without sample ids, p_i ~ ||H_i||.
- A cached norm counts as at least a tenth of the batch's mean (sampling.NORM_FLOOR): last epoch's zero may be wrong.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dsq.arguments import flag, number, pattern, whole_number
from dsq.quantizers import Quantised
from dsq.stash.controller import Controller, Summary, enter_mode
from dsq.stash.interception import Interception, in_backward, stash_now
from dsq.stash.policy import register
from dsq.stash.wtacrs.layers import SampledLinear, Site, sampled_products
from dsq.stash.wtacrs.rows import RowSampler, Tally


@dataclass(eq=False)
class WTACRS(Controller):
    """The policy at work. Told the samples of each batch, it draws by their gradient norms of the epoch before."""

    by_parts = True
    sees_first = True

    sampler: RowSampler = field(kw_only=True)
    products: bool = field(kw_only=True)  #: of two activations are sampled too
    latest: Tally = field(default_factory=Tally)

    def set_sample_ids(self, ids: Iterable[int] | Tensor | None) -> None:
        """Say which samples the coming forwards see: an integer for each, in batch order; None: unknown.

        Holds until the next call. An id must name the same sample in every epoch and after a resume. A linear whose
        input has another length along its first axis (the model flattened its tokens) takes p_i ~ ||H_i|| and caches
        nothing. Under DDP a rank caches what it saw itself. Raises TypeError or ValueError where ids are
        not integers in one dimension.
        """
        self.sampler.cache.start_batch(ids)

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Count a training forward afresh, and share draws within it. What a checkpoint draws again is not counted."""
        recomputing = in_backward()
        if not recomputing:
            self.sampler.tally = Tally()
        mode = Interception(stash_now(), sampled_products(self.sampler) if self.products else {})
        if self.products:
            enter_mode(mode)
        try:
            yield
        finally:
            mode.is_over = True
            if not recomputing:
                self.sampler.close()
                self.latest = replace(self.sampler.tally)

    def restore(self, module: nn.Module) -> None:
        if isinstance(module, SampledLinear):
            object.__setattr__(module, "__class__", module.plain)
            del module.__dict__["_wtacrs"]

    def report(self) -> Summary:
        tally, known = self.latest, len(self.sampler.cache.slot_of)
        details = (
            f"{tally.kept} of {tally.tokens} rows kept in {tally.draws} draws, read by {tally.readers} linears",
            f"{tally.cached} draws used cached gradient norms; {known} sample ids known",
            f"{tally.exact} linears kept whole: no more tokens than the budget",
            f"{tally.products} operands of other products sampled",
        )
        return Summary(self.name, self.attached, tally.raw_bytes, tally.kept_bytes, details)

    def state_dict(self) -> dict[str, Any]:
        """Return the cached norms and the state of the random numbers, of this rank."""
        return {"generator": self.sampler.generator.get_state(), **self.sampler.cache.state_dict()}

    def take(self, state: Mapping[str, Any]) -> None:
        self.sampler.generator.set_state(state["generator"].cpu())
        self.sampler.cache.load_state_dict(state)


@register("wtacrs", composes_with=("bfp", "checkpoint"))
def attach(
    model: nn.Module,
    *,
    ratio: float = 0.3,
    products: bool = False,
    exclude: str | None = None,
    seed: int = 0,
) -> WTACRS:
    """Estimate weight gradients of linears from round(ratio * tokens) rows of their input.

    Covers nn.Linear. Left alone: its subclasses (dsq.convert's among them, which pack their input), parametrised
    modules, and F.linear called by a module itself, as in nn.MultiheadAttention. A layer with a frozen weight keeps
    nothing, as in PyTorch.

    Args:
        ratio: part of the rows to keep, in (0, 1].
        products: sample the operands of batched matrix products of two activations too (figure 4's TensorMul):
            attention that is written with matmul or bmm (not scaled_dot_product_attention, which keeps no
            probabilities). Input gradients are exact without it and unbiased with it, but their noise flows on: small
            classifiers trained on SST-2 from random weights lost 1.7 and 3.1 points of accuracy to it, hence the
            default. Inside torch.utils.checkpoint products stay exact.
        exclude: regular expression; modules whose name it matches anywhere stay exact.
        seed: of the policy's own random numbers; a rank of a process group adds its number.
    Raises:
        TypeError, ValueError: an option that is not what it must be. ValueError: the model has none of these layers.
    """
    number("ratio", ratio, above=0, most=1)
    products = flag("products", products)
    excluded = None if exclude is None else pattern("exclude", exclude)
    sampler = RowSampler(ratio, whole_number("seed", seed) + _rank())
    controller = WTACRS(model, sampler=sampler, products=products)
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    changed = [(name, module) for name, module in linears if not (excluded and excluded.search(name))]
    if not changed:
        packed = any(isinstance(module, Quantised) for module in model.modules())
        others = "those that dsq.convert converted, which pack their input" if packed else "those excluded"
        raise ValueError(f"nothing to stash: the model has no nn.Linear besides {others}")
    for name, module in changed:
        module.__class__ = SampledLinear
        module.__dict__["_wtacrs"] = Site(name, sampler)
    controller.attached = tuple(name for name, _ in changed)
    return controller


def _rank() -> int:
    """Return this process's number, so that the ranks of a DDP run draw apart."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
