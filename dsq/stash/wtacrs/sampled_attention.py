"""nn.MultiheadAttention with sampled projections.

Its projections are F.linear calls inside one functional call, past any module that a policy could replace. So its
forward runs as PyTorch wrote it, under a mode that sends those calls to sampled_linear.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from dsq.stash.multi_head_forward import multi_head_attention_forward
from dsq.stash.wtacrs.row_samples import Tokens
from dsq.stash.wtacrs.sampled_linear import Site, sampled_linear


class SampledAttention(nn.MultiheadAttention):
    """nn.MultiheadAttention as the policy leaves it."""

    _wtacrs: Site

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        with _Projections(self._wtacrs):
            return super().forward(*args, **kwargs)


class _Projections(TorchFunctionMode):
    """Samples the F.linear calls of one attention: in-projections in order (one, two or three), then out_proj.

    Inside, an activation is (tokens, samples, features), and out_proj's input that of the queries, flattened.
    """

    def __init__(self, site: Site) -> None:
        super().__init__()
        self.site = site
        self.calls = 0
        self.query_lead: tuple[int, ...] = ()

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.multi_head_attention_forward:
            with self:
                return multi_head_attention_forward(*args, **kwargs)
        return self.project(*args, **kwargs) if func is F.linear else func(*args, **kwargs)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        lead = tuple(x.shape[:-1]) if x.dim() == 3 else self.query_lead
        self.query_lead = self.query_lead or lead
        reader = f"{self.site.name}.{self.calls}"
        self.calls += 1
        return sampled_linear(x, weight, bias, self.site.sampler, reader, Tokens(lead, 1))
