"""What analysis.stash.compare compares: models, policies with their options, and the smallest stash each could have."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import dsq
from analysis.models import GPT, encoder, resnet20
from dsq import stash


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
        for module in model.modules():
            wanted = self.note.startswith("norms") and isinstance(module, nn.BatchNorm2d)
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(wanted)
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        x.requires_grad_(self.note.startswith("input"))


def _encoder_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(16, 128, 512), torch.randn(16, 128, 512)


def _images() -> tuple[Tensor, Tensor]:
    return torch.randn(64, 3, 32, 32), torch.arange(64) % 10


def _words() -> tuple[Tensor, Tensor]:
    return torch.randint(256, (1, 2048)), torch.randint(256, (1, 2048))


def _next_words(logits_BTV: Tensor, words_BT: Tensor) -> Tensor:
    return F.cross_entropy(logits_BTV.flatten(0, 1), words_BT.flatten())


def _compiled_batch() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 256, 256), torch.randn(4, 256, 256)


def loss_that_keeps_nothing(model: nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """A loss whose gradient is random, for counting what the model alone keeps: F.mse_loss keeps the model's output,
    and its result lies in memory of that size too (PyTorch 2.13, CPU)."""
    with torch.no_grad():
        weights = torch.randn_like(model(x))
    return lambda: (model(x) * weights).sum()


CASES = {
    "encoder": TrainingCase(encoder, _encoder_batch, F.mse_loss),
    "encoder, SDPA": TrainingCase(lambda: encoder(sdpa=True), _encoder_batch, F.mse_loss),
    "resnet": TrainingCase(resnet20, _images, F.cross_entropy),
    "resnet, norms": TrainingCase(resnet20, _images, F.cross_entropy, "norms only, BN eval"),
    "resnet, input": TrainingCase(resnet20, _images, F.cross_entropy, "input only, BN eval"),
    "boundaries": TrainingCase(lambda: GPT(256, 2048, 256, 12, 4, dropout=0.0), _words, _next_words),
    "compiled": TrainingCase(lambda: encoder(4, 256, 4, 1024, sdpa=True), _compiled_batch, F.mse_loss),
}

#: (policy, options), in the order of applying; "dsq.convert" is the converter of linears, with its levels; "around" is
#: what a GPT calls its blocks with; "compile" compiles the blocks one by one, or the model as one graph
Policy = tuple[str, dict[str, Any]]
Policies = tuple[Policy, ...]
Smallest = float | Callable[[float], float] | None


@dataclass(frozen=True)
class PolicySetup:
    """One row: a case under policies."""

    name: str
    case: str
    policies: Policies = ()
    smallest: Smallest = None  #: MiB, or from the plain stash's MiB; None: not known

    @property
    def model(self) -> str:
        """The model's name: one model may have several cases."""
        return self.case.partition(",")[0]

    @property
    def row_name(self) -> str:
        """The setup's name, and who needs a gradient, where that is not every parameter."""
        note = CASES[self.case].note
        return f"{self.name} ({note})" if note else self.name

    @property
    def stochastic(self) -> bool:
        """Whether the gradient is drawn."""
        return any(name in ("mesa", "gact", "wtacrs") for name, _ in self.policies)

    def least(self, plain: float) -> float | None:
        """The smallest stash possible, MiB, where the plain one is ``plain``."""
        return self.smallest(plain) if callable(self.smallest) else self.smallest


def attach(model: nn.Module, policies: Policies) -> tuple[nn.Module, list[Any]]:
    """Apply them to a model, in place; the model to call, and the controllers."""
    controllers = []
    for name, options in policies:
        if name == "dsq.convert":
            dsq.convert(model, dsq.DSQConfig(**options))
        elif name == "around":
            model.around = options["call"]
        elif name == "compile" and options["whole"]:
            model = torch.compile(model, fullgraph=True)  # type: ignore[assignment]
        elif name == "compile":
            for block in list(model.children())[:-1]:
                block.compile()
        else:
            controllers.append(stash.apply(model, name, **options))
    return model, controllers


def bits_a_value(bits: float, masks: float = 0.0) -> Callable[[float], float]:
    """Every saved fp32 value in ``bits`` bits, beside ``masks`` MiB of exact masks."""
    return lambda plain: plain * bits / 32 + masks


_BFP4, _BFP2 = (("bfp", {"bits": bits, "format": "bfp"}) for bits in (4, 2))
_SNVINT4, _SNVINT2 = (("bfp", {"bits": bits, "format": "snvint"}) for bits in (4, 2))
_MESA = ("mesa", dict[str, Any]())
_CHECKPOINT, _SELECTIVE = ("checkpoint", dict[str, Any]()), ("selective", dict[str, Any]())
_WTA, _WTA_PRODUCTS = ("wtacrs", {"ratio": 0.3}), ("wtacrs", {"ratio": 0.3, "products": True})
_BLOCKS, _GRAPH = ("compile", {"whole": False}), ("compile", {"whole": True})
_SAME = bits_a_value(32)  #: as much as PyTorch keeps: every parameter trains
#: MiB: a bit for each of the 92 MiB of fp32 values that the ResNet's ReLUs put out
_RELU_BITS = 92 / 32
#: MiB: without 0.7 of the inputs of the linears, 28 MiB a block
_WTA_LEAST = 432.2 - 0.7 * 6 * 28
_PRODUCTS_LEAST = 264.0
_SDPA = 384.6
#: MiB: the inputs of all blocks but the first, whose is the batch, and of the last norm
_BOUNDARIES, _BATCH = 24.0, 4.0
_CODED = _BOUNDARIES + _BATCH


def _around(call: Callable[..., Any]) -> Policy:
    return "around", {"call": call}


def _gact(bits: int, **options: Any) -> Policy:
    return "gact", {"bits": bits, **options}


def _of_any_model(case: str, masks: float = 0.0) -> tuple[PolicySetup, ...]:
    rows: tuple[tuple[str, Policy, float], ...] = (
        ("bfp 4", _BFP4, 4.5),
        ("bfp 2", _BFP2, 2.5),
        ("snvint 4", _SNVINT4, 4.5),
        ("snvint 2", _SNVINT2, 2.5),
        ("mesa", _MESA, 8),
        ("gact 4", _gact(4), 4.25),
        ("gact 2", _gact(2), 2.25),
        ("gact 4, uniform bits", _gact(4, adapt_interval=None), 4.25),
        ("gact 4 over BFP", _gact(4, format="bfp", adapt_interval=None), 4.5),
        ("gact 4 over snvint", _gact(4, format="snvint", adapt_interval=None), 4.5),
    )
    return tuple(PolicySetup(name, case, (policy,), bits_a_value(bits, masks)) for name, policy, bits in rows)


SETUPS = (
    PolicySetup("plain", "encoder", smallest=_SAME),
    PolicySetup("SDPA", "encoder, SDPA", smallest=_SDPA),
    PolicySetup("checkpoint", "encoder", (_CHECKPOINT,), _BOUNDARIES),
    PolicySetup("dsq.convert [16,4,4,16], linears", "encoder", (("dsq.convert", {"levels": "[16,4,4,16]"}),)),
    *_of_any_model("encoder"),
    PolicySetup("selective", "encoder", (_SELECTIVE,), _SAME),
    PolicySetup("wtacrs 0.3", "encoder", (_WTA,), _WTA_LEAST),
    PolicySetup("wtacrs 0.3 + bfp 4", "encoder", (_WTA, _BFP4), _WTA_LEAST * 4.5 / 32),
    PolicySetup("wtacrs 0.3, products", "encoder", (_WTA_PRODUCTS,), _PRODUCTS_LEAST),
    PolicySetup("wtacrs 0.3, products + bfp 4", "encoder", (_WTA_PRODUCTS, _BFP4), _PRODUCTS_LEAST * 4.5 / 32),
    PolicySetup("wtacrs 0.3, products + bfp 2", "encoder", (_WTA_PRODUCTS, _BFP2), _PRODUCTS_LEAST * 2.5 / 32),
    PolicySetup("selective + bfp 4", "encoder", (_SELECTIVE, _BFP4), bits_a_value(4.5)),
    PolicySetup("checkpoint + bfp 4", "encoder", (_CHECKPOINT, _BFP4), _CODED * 4.5 / 32),
    PolicySetup("gact 4, CB1", "encoder", (_gact(4, level="CB1", adapt_interval=None),), _CODED * 4.25 / 32),
    PolicySetup("SDPA + bfp 4", "encoder, SDPA", (_BFP4,), (_SDPA + _BATCH) * 4.5 / 32),
    PolicySetup("plain", "resnet"),
    PolicySetup("checkpoint", "resnet", (_CHECKPOINT,)),
    *_of_any_model("resnet", _RELU_BITS),
    PolicySetup("selective", "resnet", (_SELECTIVE,), _SAME),
    PolicySetup("wtacrs 0.3", "resnet", (_WTA,)),
    PolicySetup("selective + bfp 4", "resnet", (_SELECTIVE, _BFP4), bits_a_value(4.5, _RELU_BITS)),
    PolicySetup("checkpoint + bfp 4", "resnet", (_CHECKPOINT, _BFP4)),
    PolicySetup("plain", "resnet, norms"),
    PolicySetup("selective", "resnet, norms", (_SELECTIVE,), 121.0),
    PolicySetup("plain", "resnet, input"),
    PolicySetup("selective", "resnet, input", (_SELECTIVE,), 23.0),
    PolicySetup("plain", "boundaries"),
    PolicySetup("checkpoint", "boundaries", (_around(partial(checkpoint, use_reentrant=False)),)),
    PolicySetup("bfp 4", "boundaries", (_around(partial(stash.packed_checkpoint, fmt=dsq.BFP(4))),)),
    PolicySetup("snvint 4", "boundaries", (_around(stash.packed_checkpoint),)),
    PolicySetup("bfp 2", "boundaries", (_around(partial(stash.packed_checkpoint, fmt=dsq.BFP(2))),)),
    PolicySetup("plain", "compiled"),
    PolicySetup("blocks compiled", "compiled", (_BLOCKS,)),
    *(
        PolicySetup(f"{name}{how}", "compiled", (*compiled, policy))
        for name, policy in (("bfp 4", _BFP4), ("mesa", _MESA))
        for how, compiled in (("", ()), (", blocks compiled", (_BLOCKS,)), (", one graph", (_GRAPH,)))
    ),
)
