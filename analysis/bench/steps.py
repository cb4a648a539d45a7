"""Races of training steps. What a contestant does is its name (analysis/attach.py).

"fused": inside dsq.fused_attention, where converted models always are.
"""

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq
from analysis.attach import attach
from analysis.models import encoder, from_transformers, resnet20, transformer
from analysis.timing import Call, Race, keep_freed_memory, race

Training = tuple[nn.Module, Callable[[nn.Module], Tensor]]  #: a model, and the loss of its batch
AUTOCAST = "bf16 autocast"
LEVELS = ("[2,2,2,16]", "[4,4,4,16]", "[16,4,4,16]", "[4,4,4,8]", "[4,3,3,8]", "[8,4,4,8]")
GPT_TOKENS = 512


def train(name: str, training: Training) -> tuple[nn.Module, Callable[[], Tensor]]:
    """The model as the contestant has it, changed in place, and the forward of its loss."""
    model, loss_of = training
    attach(model, name)

    def loss() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in name):
            return loss_of(model)

    return model, loss


def step(name: str, training: Training, warm: int = 0, adam: bool = False) -> Call:
    """A contestant's forward and backward, and a step of Adam if asked for; gradients are dropped."""
    model, loss = train(name, training)
    optimizer = torch.optim.Adam(model.parameters(), fused=True) if adam else None
    attention = dsq.fused_attention if name.startswith("[") or "fused" in name else nullcontext

    def run() -> None:
        with attention():
            loss().backward()
        if optimizer:
            optimizer.step()
        model.zero_grad()

    for _ in range(warm):
        run()
    return run


# ---- models ----


def blocks(width: int = 512, sequences: int = 8, length: int = 128, dtype: torch.dtype = torch.float32) -> Training:
    """Six pre-LN blocks; the loss is a mean of squares."""
    torch.manual_seed(0)
    heads = 8 if width == 512 else 4
    x = torch.randn(sequences, length, width, dtype=dtype)
    return encoder(6, width, heads, 4 * width, sdpa=True), partial(_squares, x)


def _squares(x: Tensor, model: nn.Module) -> Tensor:
    return model(x).float().square().mean()


def small(name: str, width: int) -> Training:
    """Three blocks of a transformer in heads of 64, 1,024 tokens; or the ResNet-20 and 64 images."""
    torch.manual_seed(0)
    if name == "encoder":
        return encoder(3, width, width // 64, 4 * width, sdpa=True), partial(_squares, torch.randn(8, 128, width))
    if name == "resnet":
        images, classes = torch.randn(64, 3, 32, 32), torch.arange(64) % 10
        return resnet20(), lambda model: F.cross_entropy(model(images), classes)
    model, inputs = transformer(name, width, 3, width // 64)
    return model, lambda model: model(**inputs).loss


def gpt() -> Training:
    """GPT-2 of 124M parameters, random weights, one sequence of random tokens, no dropout."""
    torch.manual_seed(0)
    model = from_transformers("GPT2LMHeadModel", n_positions=GPT_TOKENS)
    ids = torch.randint(model.config.vocab_size, (1, GPT_TOKENS))
    return model, lambda model: model(input_ids=ids, labels=ids).loss


# ---- races ----


def _race(title: str, training: Training, names: Sequence[str], rounds: int, **how: Any) -> Race:
    """The first name is the baseline."""
    keep_freed_memory()
    calls = {name: step(name, copy.deepcopy(training), **how) for name in names}
    gc.freeze()  # a full collection goes through all that transformers made: a seventh of the step in which it falls
    first = names[0]
    return race(f"{title}, {torch.get_num_threads()} threads", (first, calls.pop(first)), calls, rounds)


def six_blocks(rounds: int) -> Iterator[Race]:
    """Six blocks against fp32 at two widths, with the whole stash and under autocast."""
    names = ["fp32", AUTOCAST, f"{AUTOCAST} + fused", *LEVELS, *(f"{levels} whole" for levels in LEVELS[1:])]
    names += [f"{levels} + autocast" for levels in ("[4,4,4,16]", "[4,4,4,8]", "[8,4,4,8]")]
    more = [f"[4,4,4,16] {name}" for name in ("bfp", "sbfp", "fixed")]
    more += ["[2,2,2,16] stochastic", "[2,2,2,16] float32"]
    yield _race("six blocks, d 512, 1024 tokens", blocks(), names + more, rounds)
    yield _race("six blocks, d 128, 1024 tokens", blocks(128, 16, 64), names, rounds)


def narrow(rounds: int) -> Iterator[Race]:
    """Six blocks in bfloat16: under autocast, and of a model that is in it altogether."""
    names = [AUTOCAST, "fp32", *(f"{levels} + autocast" for levels in (*LEVELS, "[8,8,8,16]"))]
    yield _race("six blocks, d 512, 1024 tokens", blocks(), names, rounds)
    model, loss = blocks(dtype=torch.bfloat16)
    names = ["bf16", *LEVELS, "[8,8,8,16]"]
    yield _race("bf16 model, six blocks, d 512, 1024 tokens", (model.bfloat16(), loss), names, rounds)


def formats(rounds: int) -> Iterator[Race]:
    """The formats with a signed scale against block floating point; the kernels' part is in kernels.py."""
    for levels in ("[4,4,4,16]", "[4,4,4,8]"):
        names = [f"{levels} {name}" for name in ("bfp", "sbfp", "snvint")]
        yield _race("six blocks, d 512, 1024 tokens", blocks(), names, rounds)


def tiny(rounds: int) -> Iterator[Race]:
    """One layer too small to hide what a call costs; at least 30 rounds."""
    torch.manual_seed(0)
    training = nn.Linear(64, 64), partial(_squares, torch.randn(32, 64, requires_grad=True))
    yield _race("one layer 64 x 64, 32 tokens", training, ["fp32", *LEVELS], max(rounds, 30))


def policies(rounds: int) -> Iterator[Race]:
    """Every policy that codes what is saved against plain steps: transformers of width 512 and the ResNet-20, then the
    transformers at width 128, where what a policy takes once a tensor weighs more; gact has adapted by then."""
    transformers = ("encoder", "vit", "bert", "gpt2", "llama")
    for width, warm, names in ((512, 2, (*transformers, "resnet")), (128, 25, transformers)):
        for name in names:
            yield _race(
                f"{name}, d {width}", small(name, width), ["fp32", "bfp 4", "mesa", "gact 4"], rounds, warm=warm
            )


def gpt_steps(rounds: int) -> Iterator[Race]:
    """GPT-2 of 124M parameters, forward, backward and Adam, 512 tokens; the tied output head is not converted."""
    names = [AUTOCAST, "fp32", "[4,4,4,16] whole", *(f"{levels} whole + autocast" for levels in LEVELS[1:4])]
    yield _race(f"GPT-2 124M, {GPT_TOKENS} tokens", gpt(), names, rounds, adam=True)
