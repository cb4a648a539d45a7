"""Selective differentiation on its paper's architectures (memsave, tables 1 and 3): what is kept, by who is wanted.

    python -m analysis.stash.wanted    # needs torchvision; writes analysis/results/wanted.csv

All parameters want a gradient, or the input alone, the convolutions, the norms. Random weights, norms in evaluation
mode, images of 224 x 224. The paper gives the peak of a step on a GPU, weights included, as a share of PyTorch's with
all wanted; here stands the share of what a forward keeps, which does not depend on the batch.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn

import dsq
from analysis import ROOT
from dsq.command import OneLineParser, as_csv, guarded, table, write_text

OUT = ROOT / "analysis" / "results" / "wanted.csv"
#: the paper's shares of a peak: with all wanted, the input, the convolutions, the norms (None: the model has none)
PAPER: dict[str, tuple[float, float, float, float | None]] = {
    "resnet101": (1.10, 0.19, 0.55, 0.62),
    "resnext101_64x4d": (1.10, 0.15, 0.55, 0.59),
    "vgg16": (0.87, 0.60, 0.87, None),
    "mobilenet_v3_large": (1.05, 0.30, 0.65, 0.65),
    "efficientnet_v2_l": (1.00, 0.39, 0.69, 0.69),
    "fcn_resnet101": (1.10, 0.17, 0.55, 0.62),
    "deeplabv3_resnet101": (1.09, 0.17, 0.55, 0.61),
}
WANTED: dict[str, tuple[type[nn.Module], ...]] = {
    "all": (nn.Module,),
    "input": (),
    "convolutions": (nn.Conv2d,),
    "norms": (nn.BatchNorm2d,),
}
COLUMNS = {"model": "", "wanted": "", "PyTorch, MiB": ".1f", "selective, MiB": ".1f", "share": ".2f", "paper": ".2f"}


def rows(name: str) -> list[dict[str, Any]]:
    """Return the bytes that the model keeps for its backward, by who wants a gradient; assert equal gradients."""
    from torchvision.models import get_model

    torch.manual_seed(0)
    options = {"weights_backbone": None} if "_resnet101" in name else {}
    model: nn.Module = get_model(name, weights=None, **options).eval()
    x = torch.randn(2, 3, 224, 224)
    found: list[dict[str, Any]] = []
    whole = 0  #: bytes that PyTorch keeps where all are wanted, who come first
    for (wanted, kinds), paper in zip(WANTED.items(), PAPER[name], strict=True):
        leaves = want(model, x, kinds)
        if not leaves:
            continue
        plain, expected = step(model, x, leaves)
        controller = dsq.stash.apply(model, "selective")
        kept, gradients = step(model, x, leaves)
        controller.remove()
        assert all(map(torch.equal, gradients, expected)), f"{name}, {wanted}: other gradients than PyTorch's"
        whole = whole or plain
        row = {"model": name, "wanted": wanted, "PyTorch, MiB": plain / 2**20, "selective, MiB": kept / 2**20}
        found.append(row | {"share": kept / whole, "paper": paper})
    return found


def want(model: nn.Module, x: Tensor, kinds: tuple[type[nn.Module], ...]) -> list[Tensor]:
    """Set who wants a gradient: the parameters of modules of these kinds; of none, the input. Returns them."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(isinstance(module, kinds))
    x.requires_grad_(not kinds)
    return [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad]


def step(model: nn.Module, x: Tensor, leaves: list[Tensor]) -> tuple[int, list[Tensor]]:
    """Bytes kept by a forward, and the gradients of the sum of what it gives."""

    def forward() -> Tensor:
        y = model(x)
        return y["out"] if isinstance(y, dict) else y

    return dsq.stash.measure(forward).nbytes, list(torch.autograd.grad(forward().sum(), leaves))


def main(arguments: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.stash.wanted", description=__doc__)
    parser.parse_args(arguments)

    def run() -> None:
        found = [row for name in PAPER for row in rows(name)]
        print(table(found, COLUMNS))
        write_text(OUT, as_csv(found, ".4g"))

    return guarded(parser.prog, run)


if __name__ == "__main__":
    sys.exit(main())
