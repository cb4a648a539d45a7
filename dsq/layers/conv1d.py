"""GPT-2's linear layer, whose weight is (in, out): the same products, read through a transposed view."""

from torch import Tensor
from transformers.pytorch_utils import Conv1D as PlainConv1D

from dsq.linear import multiply
from dsq.quantizers import Quantised


class Conv1D(Quantised, PlainConv1D):
    """transformers' ``Conv1D`` quantised as ``dsq.Linear`` is; same parameters, same state dict."""

    plain = PlainConv1D

    def forward(self, x: Tensor) -> Tensor:
        return multiply(self, x, self.weight.t(), self.bias)

    def __repr__(self) -> str:  # that of transformers asks for no extra_repr
        return f"{super().__repr__()[:-1]}, {self.extra_repr()})"
