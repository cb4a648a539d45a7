"""The bytes that policies claim against those of the allocator (analysis/memory/allocator.py), in a process of its own.

The tolerance is 3 %, or OVERHEAD where that is more: what is no tensor, the nodes of the graph and the objects that
saved tensors are kept in, is 0.1 MiB in the transformers here and 0.2 in the ResNet, whatever their tensors' widths.
As a module it prints the bytes of a counted process as JSON.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from analysis.library_models import transformer
from analysis.memory.allocator import compiler, figures, step_bytes
from analysis.models import attach, encoder, resnet20
from dsq import stash


def _with_loss(model: Any, *args: Tensor, **inputs: Tensor) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model, and a loss that keeps nothing, whose gradient is random: F.mse_loss keeps the model's output, and its
    result lies in memory of that size too (PyTorch 2.13, CPU)."""

    def run() -> Tensor:
        y = model(*args, **inputs)
        return getattr(y, "logits", y)

    with torch.no_grad():
        weights = torch.randn_like(run())
    return model, lambda: (run() * weights).sum()


def _encoder(dropout: float = 0.0) -> tuple[nn.Module, Callable[[], Tensor]]:
    return _with_loss(encoder(2, 128, 4, 512, dropout), torch.randn(8, 96, 128))


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


def _transformer(kind: str) -> tuple[nn.Module, Callable[[], Tensor]]:
    """A model of transformers with its own loss, or, where reports are to count all, with one that keeps nothing."""
    model, inputs = transformer(kind, 96, 2, 4, 200, (16, 64), num_labels=10)
    if kind not in ("bert", "vit"):
        return model, lambda: model(**inputs).loss
    del inputs["labels"]
    return _with_loss(model, **inputs)


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[], Tensor]]]] = {
    "encoder": _encoder,
    "dropout": lambda: _encoder(dropout=0.1),
    "autocast": _autocast,
    "compiled": _compiled,
    "graph": lambda: _with_loss(torch.compile(encoder(2, 128, 4, 512), fullgraph=True), torch.randn(8, 96, 128)),
    "vit": lambda: _transformer("vit"),
    "resnet": lambda: _with_loss(resnet20((16, 32, 64)), torch.randn(16, 3, 32, 32)),
    "bert": lambda: _transformer("bert"),
    "gpt2": lambda: _transformer("gpt2"),
    "llama": lambda: _transformer("llama"),
}


#: setups by the names that analysis/models.py reads
POLICIES = (
    *("plain", "snvint 4", "snvint 2", "mesa", "gact 4 uniform", "gact 2 uniform", "gact 4", "selective"),
    *("wtacrs 0.3", "checkpoint", "wtacrs 0.3 + snvint 4", "selective + snvint 4", "checkpoint + snvint 4"),
    *("checkpoint + mesa", "checkpoint + gact 4 uniform", "checkpoint + selective", "checkpoint + wtacrs 0.3"),
    "checkpoint + wtacrs 0.3 + snvint 4",
)


def claim(model_name: str, policies: str) -> dict[str, Any]:
    """Train the case for a few steps and count one: bytes that it and the policies' reports claim, and those held."""
    torch.manual_seed(0)
    model, forward = MODELS[model_name]()
    controllers = attach(model, policies)
    held = step_bytes(forward)
    claimed = stash.measure(forward).nbytes
    reported = {controller.name: controller.report().saved_bytes for controller in controllers}
    return vars(held) | {"claimed_stash": claimed, "reported": reported}


def print_claims(names: list[str]) -> None:
    """Print {"model/policies": claim, or the text of the error that came} as JSON."""
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in names:
        try:
            results[name] = claim(*name.split("/"))
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(results))


pytestmark = [pytest.mark.slow, pytest.mark.skipif(compiler() is None, reason="no C compiler, or no glibc")]
OVERHEAD = 224 * 1024
#: nothing is kept that their reports do not count
WHOLE = ("snvint 4", "snvint 2", "mesa", "gact 4 uniform", "gact 2 uniform")
SLOW = "gact 4"  # a backward a saved tensor
#: whose losses keep nothing; in compiled graphs no report counts
COUNTED = ("encoder", "dropout", "autocast", "vit", "resnet", "bert")
EAGER = [model for model in MODELS if model not in ("compiled", "graph")]
CASES = [f"{model}/{policies}" for model in EAGER for policies in POLICIES if policies != SLOW]
CASES += [f"compiled/{policies}" for policies in ("plain", "snvint 4", "snvint 2")]
CASES += [f"graph/{policies}" for policies in ("plain", "snvint 4")]
CASES += [f"{model}/{SLOW}" for model in ("encoder", "vit", "bert")]


@pytest.fixture(scope="session")
def claims():
    pytest.importorskip("transformers")

    @cache
    def of_model(model):
        return figures(__spec__.name, *(case for case in CASES if case.startswith(f"{model}/")))

    return of_model


@pytest.mark.parametrize("case", CASES)
def test_claims_are_what_the_allocator_holds(claims, case):
    claimed = claims(case.partition("/")[0])[case]
    assert isinstance(claimed, dict), claimed
    assert claimed["claimed_stash"] == pytest.approx(claimed["stash"], rel=0.03, abs=OVERHEAD)
    assert claimed["left"] <= OVERHEAD
    assert claimed["peak"] >= claimed["stash"]
    model, _, policies = case.partition("/")
    if policies in WHOLE and model in COUNTED:
        assert sum(claimed["reported"].values()) == pytest.approx(claimed["stash"], rel=0.03, abs=OVERHEAD)


if __name__ == "__main__":
    print_claims(sys.argv[1:])
