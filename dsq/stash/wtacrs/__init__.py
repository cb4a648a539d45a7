"""WTA-CRS: linears keep a sample of their input's rows for the weight gradient (Liu et al., 2023, arXiv 2305.15265).

    forward    Z  = H W^T + b                             exact; stash k rows of H, their numbers and their scales
    backward   dH = dZ W                                  exact
               db = sum of dZ over tokens                 exact
               dW = sum_t scale_t dZ[row_t]^T H[row_t]    unbiased (algorithm 1)

rows.py: one draw for all layers that read one activation; gradient norms of each sample of the data set; the estimator.

What the paper leaves open, and our choice:
- A row's scale stays beside it until the backward. Scaling in the forward (algorithm 2) would spread the magnitudes of
  the kept rows, and cost precision where another policy packs them.
- Norms are cached a sample, as in the paper, so the tokens of a sample share one; without sample ids, p_i ~ ||H_i||.
- A cached norm counts as at least a tenth of the batch's mean (rows.NORM_FLOOR): last epoch's zero may be wrong.
- Products of two activations stay exact: their gradients flow on, and everything before would see the noise.

Shapes: T tokens (all leading dimensions), K in-features, N out-features, k kept rows.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dsq.arguments import number, whole_number
from dsq.quantizers import Quantised
from dsq.stash.codes import keep, kept
from dsq.stash.controller import RUNNING, Controller, Summary
from dsq.stash.interception import in_backward, stash_now
from dsq.stash.policy import register
from dsq.stash.wtacrs.rows import RowSampler, Tally, budget, norms_of, samples_of


@dataclass(eq=False)
class WTACRS(Controller):
    """The policy at work. Told the samples of each batch, it draws by their gradient norms of the epoch before."""

    by_parts = True

    sampler: RowSampler = field(kw_only=True)
    latest: Tally = field(default_factory=Tally)

    def set_sample_ids(self, ids: Iterable[int] | Tensor | None) -> None:
        """Say which samples the coming forwards see: an integer for each, in batch order; None: unknown.

        Holds until the next call. An id must name the same sample in every epoch and after a resume. A linear whose
        input has another length along its first axis (the model flattened its tokens) takes p_i ~ ||H_i|| and caches
        nothing. Under DDP a rank caches what it saw itself. Raises TypeError where ids are not integers.
        """
        self.sampler.cache.start_batch(ids)

    @contextmanager
    def around(self, module: nn.Module) -> Iterator[None]:
        """Count a training forward afresh, and share draws within it. What a checkpoint draws again is not counted."""
        recomputing = in_backward()
        if not recomputing:
            self.sampler.tally = Tally()
        try:
            yield
        finally:
            self.sampler.close()
            if not recomputing:
                self.latest = replace(self.sampler.tally)

    def restore(self, module: nn.Module) -> None:
        if isinstance(module, SampledLinear):
            object.__setattr__(module, "__class__", nn.Linear)
            del module.__dict__["_wtacrs"]

    def report(self) -> Summary:
        tally, known = self.latest, len(self.sampler.cache.slot_of)
        details = (
            f"{tally.kept} of {tally.tokens} rows kept in {tally.draws} draws, read by {tally.readers} linears",
            f"{tally.cached} draws used cached gradient norms; {known} sample ids known",
            f"{tally.exact} linears kept whole: no more tokens than the budget",
        )
        return Summary(self.name, self.attached, tally.raw_bytes, tally.kept_bytes, details)

    def state_dict(self) -> dict[str, Any]:
        """Return the cached norms and the state of the random numbers, of this rank."""
        return {"generator": self.sampler.generator.get_state(), **self.sampler.cache.state_dict()}

    def take(self, state: Mapping[str, Any]) -> None:
        self.sampler.generator.set_state(state["generator"].cpu())
        self.sampler.cache.load_state_dict(state)


@register("wtacrs", composes_with=("bfp", "checkpoint"))
def attach(model: nn.Module, *, ratio: float = 0.3, seed: int = 0) -> WTACRS:
    """Estimate weight gradients of linears from round(ratio * tokens) rows of their input.

    Covers nn.Linear. Left alone: its subclasses (dsq.convert's among them, which pack their input), parametrised
    modules, and F.linear called by a module itself, as in nn.MultiheadAttention. A layer with a frozen weight keeps
    nothing, as in PyTorch.

    Args:
        ratio: part of the rows to keep, in (0, 1].
        seed: of the policy's own random numbers; a rank of a process group adds its number.
    Raises:
        TypeError, ValueError: an option that is not what it must be. ValueError: the model has none of these layers.
    """
    number("ratio", ratio, above=0, most=1)
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()  # of DDP: they draw apart
    sampler = RowSampler(ratio, whole_number("seed", seed) + (torch.distributed.get_rank() if ranks else 0))
    controller = WTACRS(model, sampler=sampler)
    linears = [(name, module) for name, module in model.named_modules() if type(module) is nn.Linear]
    if not linears:
        packed = any(isinstance(module, Quantised) for module in model.modules())
        others = " besides those that dsq.convert converted, which pack their input" if packed else ""
        raise ValueError(f"nothing to stash: the model has no nn.Linear{others}")
    for name, module in linears:
        module.__class__ = SampledLinear
        module.__dict__["_wtacrs"] = sampler, name
    controller.attached = tuple(name for name, _ in linears)
    return controller


class SampledLinear(nn.Linear):
    """nn.Linear with an estimated weight gradient; as it was where the weight is frozen or k = T."""

    _wtacrs: tuple[RowSampler, str]  #: and the name of the layer, under which its gradient norms are cached

    def forward(self, input: Tensor) -> Tensor:  # the name is nn.Linear's
        if not torch.is_grad_enabled() or RUNNING.suspended or not self.weight.requires_grad:
            return F.linear(input, self.weight, self.bias)
        (sampler, reader), rows = self._wtacrs, input.shape[:-1].numel()
        if rows == 0 or budget(rows, sampler.ratio) >= rows:
            sampler.tally.exact += 1
            return F.linear(input, self.weight, self.bias)
        z: Tensor = _SampledLinear.apply(input, self.weight, self.bias, sampler, reader)  # type: ignore[no-untyped-call]
        return z


class _SampledLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w_NK: Tensor, bias: Tensor | None, sampler: RowSampler, reader: str) -> Tensor:
        z = F.linear(x, w_NK, bias)
        sample = sampler.sample(x, z.dtype, reader)
        # all through save_for_backward: a checkpoint's recomputation then replaces rows, numbers and scales together
        assert sample.rows is not None
        keep(ctx, w_NK if ctx.needs_input_grad[0] else None, stash_now().code(sample.rows, "linear"), sample.index)
        ctx.sampler, ctx.sample, ctx.reader, ctx.samples = sampler, sample, reader, samples_of(x)
        ctx.dtypes = x.dtype, w_NK.dtype, None if bias is None else bias.dtype
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        w_NK, h_kK, index_2k = kept(ctx)
        x_dtype, w_dtype, bias_dtype = ctx.dtypes
        ctx.sample.close()
        dz_TN = dz.reshape(-1, dz.shape[-1])
        dx = dw_NK = db_N = None
        if ctx.needs_input_grad[0]:
            dx = (dz @ w_NK.to(dz.dtype)).to(x_dtype)
        if ctx.needs_input_grad[1]:
            dz_norm_T = norms_of(dz_TN)
            ctx.sampler.record(ctx.sample, ctx.reader, dz_norm_T, ctx.samples)
            # an infinity in a row that was not drawn must still reach a loss scaler: it makes every scale NaN
            scale_k = index_2k[1].view(torch.float32) + 0 * dz_norm_T.sum()
            # H takes the scale: p_i ~ ||H_i|| evens its rows out, where scaled rows of dZ could leave float16's range
            scaled_kK = (h_kK * scale_k[:, None]).to(dz.dtype)
            dw_NK = (dz_TN.index_select(0, index_2k[0]).t() @ scaled_kK).to(w_dtype)
        if ctx.needs_input_grad[2]:
            db_N = dz_TN.sum(0).to(bias_dtype)
        return dx, dw_NK, db_N, None, None
