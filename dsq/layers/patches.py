"""A convolution that cuts an image into patches: one linear layer over the values of each patch."""

from torch import Tensor, nn

from dsq.linear import multiply
from dsq.quantizers import Quantised


class PatchConv2d(Quantised, nn.Conv2d):
    """``nn.Conv2d`` whose windows neither overlap nor leave pixels between, quantised as ``dsq.Linear`` is. Raises
    ValueError for an input of other channels, or smaller than a patch.

    Shape suffixes: B batch, C channels, H and W patches down and across, h and w pixels of a patch, N out-channels.
    """

    plain = nn.Conv2d

    def forward(self, input: Tensor) -> Tensor:
        h, w = self.kernel_size
        x = input if input.dim() == 4 else input[None]
        if x.dim() != 4 or x.shape[1] != self.in_channels or x.shape[2] < h or x.shape[3] < w:
            accepted = f"(B, {self.in_channels}, at least {h}, at least {w}), with or without B"
            raise ValueError(f"input must be {accepted}, got {tuple(input.shape)}")
        rows, columns = x.shape[2] // h, x.shape[3] // w
        x = x[:, :, : rows * h, : columns * w].unflatten(3, (columns, w)).unflatten(2, (rows, h))  # (B, C, H, h, W, w)
        y_BHWN = multiply(self, x.permute(0, 2, 4, 1, 3, 5).flatten(3), self.weight.flatten(1), self.bias)
        y_BNHW = y_BHWN.permute(0, 3, 1, 2)
        if x.is_contiguous():  # as nn.Conv2d lays its result out: models may view it
            y_BNHW = y_BNHW.contiguous()
        return y_BNHW if input.dim() == 4 else y_BNHW[0]


def cuts_patches(module: nn.Module) -> bool:
    """Whether ``module``, an nn.Conv2d, is such a convolution."""
    return (
        isinstance(module, nn.Conv2d)
        and module.stride == module.kernel_size
        and module.padding in ((0, 0), "valid")
        and module.dilation == (1, 1)
        and module.groups == 1
    )
