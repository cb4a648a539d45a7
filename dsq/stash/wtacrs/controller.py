"""What wtacrs keeps between steps: the sampler, with its random numbers and cached gradient norms."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dsq.stash.controller import Summary, check_keys, check_parameters, parameter_shapes
from dsq.stash.interception import ForwardPolicy
from dsq.stash.wtacrs.row_samples import RowSampler, Tally
from dsq.stash.wtacrs.sampled_matmul import SampledProducts


@dataclass(eq=False)
class WTACRS(ForwardPolicy):
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

    def around(self, module: nn.Module) -> SampledProducts:
        return SampledProducts(self.sampler)

    def start(self, module: nn.Module, args: Any) -> None:
        """Before a forward of the model: a training one is counted afresh."""
        if torch.is_grad_enabled():
            self.sampler.tally = Tally()

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """After it: draws are shared within one forward."""
        self.sampler.close()

    def report(self) -> Summary:
        tally, known = self.sampler.tally, len(self.sampler.cache.slot_of)
        details = (
            f"{tally.kept} of {tally.tokens} rows kept in {tally.draws} draws, read by {tally.readers} linears",
            f"{tally.cached} draws used cached gradient norms; {known} sample ids known",
            f"{tally.exact} linears kept whole: no more tokens than the budget",
            f"{tally.products} operands of other products sampled",
        )
        return Summary(self.name, self.attached, tally.raw_bytes, tally.kept_bytes, details)

    def state_dict(self) -> dict[str, Any]:
        """The cached norms and the state of the random numbers, of this rank."""
        return {
            "parameters": parameter_shapes(self.model),
            "generator": self.sampler.generator.get_state(),
            **self.sampler.cache.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        check_keys(self.name, state, ("parameters", "generator", "ids", "norms"))
        check_parameters(self.name, self.model, state["parameters"])
        self.sampler.generator.set_state(state["generator"].cpu())
        self.sampler.cache.load_state_dict(state)
