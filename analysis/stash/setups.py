"""The cases of analysis.stash.compare: models, and the names of their setups (analysis/attach.py)."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.models import GPT, encoder, resnet20


@dataclass(frozen=True)
class TrainingCase:
    """A model with its batch and loss, and who needs a gradient."""

    model: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    note: str = ""  #: who needs a gradient, where it is not every parameter

    def prepare(self, model: nn.Module, x: Tensor) -> None:
        """Set requires_grad and the modes of norms."""
        if not self.note:
            return
        want(model, x, (nn.BatchNorm2d,) if self.note.startswith("norms") else ())
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()


def want(model: nn.Module, x: Tensor, kinds: tuple[type[nn.Module], ...]) -> list[Tensor]:
    """Set who wants a gradient: the parameters of modules of these kinds; of none, the input. Returns them."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            parameter.requires_grad_(isinstance(module, kinds))
    x.requires_grad_(not kinds)
    return [leaf for leaf in (x, *model.parameters()) if leaf.requires_grad]


def _values(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(shape), torch.randn(shape)


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 3, 32, 32), torch.arange(64) % 10


def _words() -> tuple[Tensor, Tensor]:
    return torch.randint(256, (1, 2048)), torch.randint(256, (1, 2048))


def _next_words(logits_BTV: Tensor, words_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), words_BT.flatten())


def loss_that_keeps_nothing(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A loss whose gradient is random, for counting what the model alone keeps: F.mse_loss keeps the model's output,
    and its result lies in memory of that size too (PyTorch 2.13, CPU)."""
    with torch.no_grad():
        weights = torch.randn_like(model(x))
    return lambda: (model(x) * weights).sum()


CASES = {
    "encoder": TrainingCase(encoder, partial(_values, 16, 128, 512), F.mse_loss),
    "encoder, SDPA": TrainingCase(lambda: encoder(sdpa=True), partial(_values, 16, 128, 512), F.mse_loss),
    "resnet": TrainingCase(resnet20, _images, F.cross_entropy),
    "resnet, norms": TrainingCase(resnet20, _images, F.cross_entropy, "norms only, BN eval"),
    "resnet, input": TrainingCase(resnet20, _images, F.cross_entropy, "input only, BN eval"),
    "boundaries": TrainingCase(lambda: GPT(256, 2048, 256, 12, 4, dropout=0.0), _words, _next_words),
}
_GACT = ("gact 4", "gact 2", "gact 4 of bfp", "gact 4 of snvint")
_ANY: tuple[str, ...] = ("plain", "checkpoint", "bfp 4", "bfp 2", "snvint 4", "snvint 2", "mesa", *_GACT)
_ANY += ("selective", "wtacrs 0.3", "selective + bfp 4", "checkpoint + bfp 4")
_WTACRS = ("wtacrs 0.3 + bfp 4", "wtacrs 0.3 products", "wtacrs 0.3 products + bfp 4", "wtacrs 0.3 products + bfp 2")
NAMES: dict[str, tuple[str, ...]] = {
    "encoder": (*_ANY, "[16,4,4,16]", *_WTACRS, "gact 4 CB1"),
    "encoder, SDPA": ("plain", "bfp 4"),
    "resnet": _ANY,
    "resnet, norms": ("plain", "selective"),
    "resnet, input": ("plain", "selective"),
    "boundaries": ("plain", "around checkpoint", "around bfp 4", "around snvint 4", "around bfp 2"),
}


@dataclass(frozen=True)
class PolicySetup:
    """One row: a case under the policies that the name says."""

    case: str
    name: str

    @property
    def model(self) -> str:
        """The model's name: one model may have several cases."""
        return self.case.partition(",")[0]

    @property
    def row_name(self) -> str:
        """The setup's name, and what its case changes."""
        note = CASES[self.case].note or self.case.partition(", ")[2]
        return f"{self.name} ({note})" if note else self.name

    @property
    def stochastic(self) -> bool:
        """Whether the gradient is drawn."""
        return any(name in self.name for name in ("mesa", "gact", "wtacrs"))


SETUPS = tuple(PolicySetup(case, name) for case, names in NAMES.items() for name in names)
