"""A training step under mesa and under gact, against the plain model's: transformers of width 512, and the ResNet-20.

Random weights, no dropout; 1,024 tokens, or 64 images of 32 x 32. narrow_policies.py times narrow transformers.
"""

import gc
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from analysis.models import encoder, resnet20
from analysis.small_transformers import from_transformers
from analysis.timing import Call, Race, keep_freed_memory, race
from dsq import stash

Training = tuple[nn.Module, Callable[[], Tensor]]  #: a model, and the loss of its batch
POLICIES = ("mesa", "gact")
WORDS = 1000


def races(rounds: int) -> Iterator[Race]:
    return races_of(transformers(512) | {"resnet": _resnet}, rounds)


def races_of(models: dict[str, Callable[[], Training]], rounds: int, before: int = 2) -> Iterator[Race]:
    """A race a model, of steps after those of ``before``."""
    keep_freed_memory()
    for name, make in models.items():
        calls = {policy: step_of(make, policy, before) for policy in POLICIES}
        baseline = step_of(make, None)
        gc.freeze()  # a full collection goes through all that transformers made
        yield race(f"{name}, {torch.get_num_threads()} threads", ("plain", baseline), calls, rounds)


def step_of(make: Callable[[], Training], policy: str | None, before: int = 2) -> Call:
    """Forward and backward; gradients stay. After two steps caches exist, and gact has chosen its bits; after 25 it has
    also measured how much of the gradient's variance is its own.
    """
    torch.manual_seed(0)
    model, loss = make()
    if policy is not None:
        stash.apply(model, policy)
    for _ in range(before):
        loss().backward()
    return lambda: loss().backward()


def _encoder(width: int) -> Training:
    model, x = encoder(3, width, width // 64, 4 * width, sdpa=True), torch.randn(8, 128, width)
    return model, lambda: model(x).square().mean()


def _resnet() -> Training:
    model, x, classes = resnet20(), torch.randn(64, 3, 32, 32), torch.arange(64) % 10
    return model, lambda: F.cross_entropy(model(x), classes)


def _transformer(head: str, **fields: Any) -> Training:
    model = from_transformers(head, **fields)
    if model.main_input_name == "pixel_values":
        images, classes = torch.randn(16, 3, 64, 64), torch.zeros(16).long()
        return model, lambda: model(pixel_values=images, labels=classes).loss
    ids = torch.randint(WORDS, (8, 128))
    return model, lambda: model(input_ids=ids, labels=ids).loss


def transformers(width: int) -> dict[str, Callable[[], Training]]:
    """Three blocks each, in heads of 64."""
    sizes = {"hidden_size": width, "num_hidden_layers": 3, "num_attention_heads": width // 64}
    wide = sizes | {"intermediate_size": 4 * width}
    return {
        "encoder": partial(_encoder, width),
        "vit": partial(_transformer, "ViTForImageClassification", image_size=64, patch_size=8, **wide),
        "bert": partial(_transformer, "BertForMaskedLM", vocab_size=WORDS, **wide),
        "gpt2": partial(_transformer, "GPT2LMHeadModel", vocab_size=WORDS, **sizes),
        "llama": partial(_transformer, "LlamaForCausalLM", vocab_size=WORDS, **wide),
    }
