"""Small models under every policy and composition; as a module it prints the bytes of a counted process as JSON."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from analysis.models import attach, encoder, resnet20
from dsq import stash
from tests.allocator import step_bytes
from tests.models import transformer


def _loss_that_keeps_nothing(run: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """A loss whose gradient is random: F.mse_loss keeps the model's output, and its result lies in memory of that size
    too (PyTorch 2.13, CPU)."""
    with torch.no_grad():
        weights = torch.randn_like(run())
    return lambda: (run() * weights).sum()


def _encoder(dropout: float = 0.0) -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = encoder(2, 128, 4, 512, dropout), torch.randn(8, 96, 128)
    return model, _loss_that_keeps_nothing(lambda: model(x))


def _autocast() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, loss = _encoder()

    def forward() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss()

    return model, forward


def _compiled() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, forward = _encoder()
    for block in model.children():
        block.compile(backend="aot_eager_decomp_partition")
    return model, forward


def _graph() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = encoder(2, 128, 4, 512), torch.randn(8, 96, 128)
    compiled: Any = torch.compile(model, fullgraph=True)
    return compiled, _loss_that_keeps_nothing(lambda: compiled(x))


def _resnet() -> tuple[nn.Module, Callable[[], Tensor]]:
    model, x = resnet20((16, 32, 64)), torch.randn(16, 3, 32, 32)
    return model, _loss_that_keeps_nothing(lambda: model(x))


def _transformer(kind: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model of transformers with its own loss, or, where reports are to count all, with one that keeps nothing."""
    model, inputs = transformer(kind, 96, 2, 4, 200, (16, 64), num_labels=10)
    if kind not in ("bert", "vit"):
        return model, lambda: model(**inputs).loss
    del inputs["labels"]
    return model, _loss_that_keeps_nothing(lambda: model(**inputs).logits)


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {
    "encoder": _encoder,
    "dropout": lambda: _encoder(dropout=0.1),
    "autocast": _autocast,
    "compiled": _compiled,
    "graph": _graph,
    "vit": lambda: _transformer("vit"),
    "resnet": _resnet,
    "bert": lambda: _transformer("bert"),
    "gpt2": lambda: _transformer("gpt2"),
    "llama": lambda: _transformer("llama"),
}


#: setups by the names that analysis/models.py reads
POLICIES = (
    *("plain", "snvint 4", "snvint 2", "mesa", "gact 4 uniform", "gact 2 uniform", "gact 4", "gact 4 CB1", "selective"),
    *("wtacrs 0.3", "checkpoint", "wtacrs 0.3 + snvint 4", "selective + snvint 4", "checkpoint + snvint 4"),
    *("checkpoint + mesa", "checkpoint + selective", "checkpoint + wtacrs 0.3"),
    "checkpoint + wtacrs 0.3 + snvint 4",
)


def claim(model_name: str, policies: str) -> dict[str, Any]:
    """Train the case for a few steps and count one: bytes that it and the policies' reports claim, and those held."""
    torch.manual_seed(0)
    model, forward = MODELS[model_name]()
    controllers = attach(model, policies)
    held = step_bytes(forward)
    claimed = stash.measure(forward).nbytes
    reported = {controller.name: controller.report().kept_bytes for controller in controllers}
    return {"stash": held.stash, "left": held.left, "claimed_stash": claimed, "reported": reported}


def main(names: list[str]) -> None:
    """Print {"model/policies": claim, or the text of the error that came} as JSON."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name in names:
        try:
            found[name] = claim(*name.split("/"))
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
