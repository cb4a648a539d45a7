"""WTA-CRS: linears keep a sample of their input's rows for the weight gradient (Liu et al., 2023, arXiv 2305.15265).

sampling.py        which rows, at which scale: the estimator
norm_cache.py      gradient norms of each sample of the data set
row_samples.py     one draw for all layers that read one activation
sampled_linear.py, sampled_attention.py   the layers
sampled_matmul.py  products of two activations, an option

What the paper leaves open, and our choice:
- A row's scale stays beside it until the backward. Scaling in the forward (algorithm 2) would spread the magnitudes of
  the kept rows, and cost precision where another policy packs them.
- Norms are cached a sample, as in the paper, so the tokens of a sample share one; without sample ids, p_i ~ ||H_i||.
- A cached norm counts as at least a tenth of the batch's mean (sampling.NORM_FLOOR): last epoch's zero may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from dsq.arguments import pattern, whole_number
from dsq.stash.hooks import around_forward
from dsq.stash.policy import Controller, Summary, check_keys, register
from dsq.stash.row_samples import RowSampler, Tally
from dsq.stash.sampled_attention import SampledAttention
from dsq.stash.sampled_linear import SampledLinear, Site
from dsq.stash.sampled_matmul import SampledProducts
from dsq.stash.swap import set_attribute, swap_classes


@dataclass(eq=False)
class WTACRS(Controller):
    """The policy at work. Told the samples of each batch, it draws by their gradient norms of the epoch before."""

    sampler: RowSampler = field(kw_only=True)

    def set_sample_ids(self, ids: Iterable[int] | Tensor | None) -> None:
        """Which samples the coming forwards see: an integer for each, in batch order; None: unknown.

        Holds until the next call. An id must name the same sample in every epoch and after a resume. A linear whose
        input has another number of samples along ``sample_dim`` (the model flattened its tokens) takes p_i ~ ||H_i||
        and caches nothing. Under DDP a rank caches what it saw itself. Raises TypeError or ValueError where ids are
        not integers in one dimension.
        """
        self.sampler.cache.start_batch(ids)

    def report(self) -> Summary:
        tally, known = self.sampler.tally, len(self.sampler.cache.slot_of)
        details = (
            f"{tally.kept} of {tally.tokens} rows kept in {tally.samples} draws, read by {tally.readers} linears",
            f"{tally.cached} draws used cached gradient norms; {known} sample ids known",
            f"{tally.exact} linears kept whole: no more tokens than the budget",
            f"{tally.products} operands of other products sampled",
        )
        return Summary(self.name, self.attached, tally.raw_bytes, tally.kept_bytes, details)

    def state_dict(self) -> dict[str, Any]:
        """The cached norms and the state of the random numbers, of this rank."""
        return {"generator": self.sampler.generator.get_state(), **self.sampler.cache.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, ("generator", "ids", "norms"))
        self.sampler.generator.set_state(state["generator"].cpu())
        self.sampler.cache.load_state_dict(state)


@register("wtacrs", composes_with=("bfp", "checkpoint"))
def attach(
    model: nn.Module,
    *,
    ratio: float = 0.3,
    products: bool = False,
    exclude: str | None = None,
    sample_dim: int = 0,
    seed: int = 0,
) -> WTACRS:
    """Estimate weight gradients of linears from round(ratio * tokens) rows of their input.

    Covers nn.Linear and the projections of nn.MultiheadAttention. Left alone: subclasses of either, parametrised
    modules, and F.linear called by the model itself. A layer with a frozen weight keeps nothing, as in PyTorch.

    Args:
        ratio: part of the rows to keep, in (0, 1].
        products: sample the operands of batched matrix products of two activations too (figure 4's TensorMul):
            attention that is written with matmul or bmm (not scaled_dot_product_attention, which keeps no
            probabilities). Input gradients are exact without it and unbiased with it, but their noise flows on: small
            classifiers trained on SST-2 from random weights lost 1.7 and 3.1 points of accuracy to it, hence the
            default. Inside torch.utils.checkpoint products stay exact.
        exclude: regular expression; modules whose name it matches anywhere stay exact.
        sample_dim: dimension of a linear's input along which the samples of a batch lie, for ``set_sample_ids``: 1 in
            (tokens, batch, features) models. nn.MultiheadAttention knows its own.
        seed: of the policy's own random numbers; a rank of a process group adds its number.
    """
    _check(ratio, products)
    sample_dim = whole_number("sample_dim", sample_dim)
    covered = _covered(exclude)
    controller = WTACRS(model, sampler=RowSampler(ratio, whole_number("seed", seed) + _rank()))
    table = {nn.Linear: SampledLinear, nn.MultiheadAttention: SampledAttention}
    changed = swap_classes(controller, model, table, covered)
    if not changed:
        raise ValueError("nothing to stash: the model has no nn.Linear or nn.MultiheadAttention besides those excluded")
    for name, module in changed:
        set_attribute(controller, module, "_wtacrs", Site(name, controller.sampler, sample_dim))
    controller.attached = tuple(name for name, _ in changed)
    root = Site("", controller.sampler, sample_dim)
    controller.undo.callback(model.register_forward_pre_hook(partial(_start, root), prepend=True).remove)
    controller.undo.callback(model.register_forward_hook(partial(_end, root), always_call=True).remove)
    if products:
        around_forward(controller, model, partial(SampledProducts, controller.sampler))
    return controller


def _start(root: Site | None, module: nn.Module, args: Any) -> None:
    if root is not None and torch.is_grad_enabled():
        root.sampler.tally = Tally()


def _end(root: Site | None, module: nn.Module, args: Any, output: Any) -> None:
    if root is not None:
        root.sampler.close()


def _check(ratio: float, products: bool) -> None:
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1:
        raise ValueError(f"ratio must be a number in (0, 1], got {ratio!r}")
    if not isinstance(products, bool):
        raise TypeError(f"products must be True or False, got {products!r}")


def _covered(exclude: str | None) -> Callable[[str, nn.Module], bool]:
    """Which modules to change, by name."""
    excluded = None if exclude is None else pattern("exclude", exclude)
    return lambda name, module: excluded is None or not excluded.search(name)


def _rank() -> int:
    """This process's number, so that the ranks of a DDP run draw apart."""
    ready = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_rank() if ready else 0
