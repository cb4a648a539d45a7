"""dsq.Linear: the module around dsq.functional.linear."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsq.config import Quantizers
from dsq.functional import linear
from dsq.precision import Precision


class Linear(nn.Linear):
    """``nn.Linear`` whose three GEMMs run quantised and whose stash is packed; same parameters, same state dict.

    In training mode and in evaluation alike the forward runs at q0; ``eval_full_precision`` makes evaluation run in
    floating point. Shapes and errors are those of ``dsq.functional.linear``.
    """

    quantizers: Quantizers
    eval_full_precision: bool = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        precision: Precision | str | Quantizers = "[16,4,4,16]",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.quantizers = Quantizers.of(precision)

    def forward(self, input: Tensor) -> Tensor:  # the name is nn.Linear's
        if self.eval_full_precision and not self.training:
            return F.linear(input, self.weight, self.bias)
        return linear(input, self.weight, self.bias, self.quantizers)

    def extra_repr(self) -> str:
        q = self.quantizers
        return f"{super().extra_repr()}, precision={q.precision}, format={type(q.q0).__name__}"
