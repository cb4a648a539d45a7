"""A training step under mesa and under gact, against the plain model's: small transformers and the ResNet."""

import gc
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.memory.models import checked_model
from analysis.models import encoder, resnet20
from analysis.timing.allocator import keep_freed_memory
from analysis.timing.race import Race, race
from analysis.timing.timer import Call
from dsq import stash

Training = tuple[nn.Module, Callable[[], Tensor]]  #: a model, and the loss of its batch


def _encoder() -> Training:
    model, x = encoder(sdpa=True), torch.randn(8, 128, 512)
    return model, lambda: model(x).square().mean()


def _resnet() -> Training:
    model, x, classes = resnet20(), torch.randn(64, 3, 32, 32), torch.arange(64) % 10
    return model, lambda: F.cross_entropy(model(x), classes)


def _checked(name: str) -> Training:
    made = checked_model(name)
    return made.model, made.loss


_SMALL: dict[str, Callable[[], Training]] = {"encoder": _encoder, "resnet": _resnet}
MODELS = ("bert", "gpt2", "llama", "vit", "encoder", "resnet")
POLICIES = ("mesa", "gact")


def races(rounds: int) -> Iterator[Race]:
    keep_freed_memory()
    for model in MODELS:
        calls = {policy: step_of(model, policy) for policy in POLICIES}
        baseline = step_of(model, None)
        gc.freeze()  # a full collection goes through all that transformers made
        yield race(f"{model}, {torch.get_num_threads()} threads", ("plain", baseline), calls, rounds)


def step_of(name: str, policy: str | None) -> Call:
    """Forward and backward; gradients stay. Two steps are made before: caches exist, and gact has chosen its bits."""
    torch.manual_seed(0)
    model, loss = _SMALL[name]() if name in _SMALL else _checked(name)
    if policy is not None:
        stash.apply(model, policy)
    for _ in range(2):
        loss().backward()
    return lambda: loss().backward()
