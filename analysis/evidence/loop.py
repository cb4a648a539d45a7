"""PyTorch's loop for all kinds of task but translation, under one setting.

AdamW, one cycle of the learning rate, gradients clipped. The runs of a task with one seed have the same initial weights
and batches, and are judged on the same held-out samples.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import dsq
from analysis.evidence.suite import Setting, Task


@dataclass(frozen=True)
class Result:
    loss: float  #: nats a token or a sample, on held-out ones
    score: float  #: BLEU, or the share of right tokens or classes in %
    saved_mib: float | None = None  #: kept between forward and backward of a step


@dataclass(frozen=True)
class Problem:
    """A classification: of the next token, of a sentence, an image or a node."""

    model: nn.Module
    predict: Callable[[Any], tuple[Tensor, Tensor]]  #: a batch -> logits (N, C), targets (N,)
    batches: Iterator[Any]  #: without an end
    held_out: Sequence[Any]  #: batches
    numbers: Callable[[Any], Tensor] | None = None  #: a batch -> the numbers of its samples (N,)


def on(problem: Problem, device: torch.device) -> Problem:
    """The problem with its model on the device, in place; batches follow it there."""

    def to(batch: Any) -> Any:
        return tuple(map(to, batch)) if isinstance(batch, tuple) else batch.to(device)

    return replace(problem, model=problem.model.to(device), predict=lambda batch: problem.predict(to(batch)))


def train(problem: Problem, task: Task, setting: Setting) -> Result:
    """Train the problem's model under ``setting``, and judge it."""
    step = steps(problem, task, setting)
    for _ in range(task.updates):
        step()
    predict = under(setting, problem)
    batch = next(problem.batches)
    saved = dsq.stash.measure(lambda: F.cross_entropy(*predict(batch))).nbytes
    loss, score = judge(problem.model, predict, problem.held_out)
    return Result(loss, score, round(saved / 2**20, 2))


def steps(problem: Problem, task: Task, setting: Setting) -> Callable[[], None]:
    """Put ``setting`` on the problem's model, in place, and return its training's next step."""
    model, sampled = problem.model, apply_policies(problem.model, setting).get("wtacrs")
    dynamic = convert(model, setting, task.updates)
    optimizer = torch.optim.AdamW(model.parameters(), task.rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, task.rate, task.updates, pct_start=0.1)
    predict = under(setting, problem)
    model.train()

    def step() -> None:
        batch = next(problem.batches)
        optimizer.zero_grad()
        if sampled and problem.numbers:
            sampled.set_sample_ids(problem.numbers(batch))  # type: ignore[attr-defined]
        F.cross_entropy(*predict(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if dynamic:
            dynamic.record(updates=1)

    return step


@torch.no_grad()
def judge(
    model: nn.Module, predict: Callable[[Any], tuple[Tensor, Tensor]], held_out: Sequence[Any]
) -> tuple[float, float]:
    """The mean loss and the share of right answers in %, over all targets of ``held_out``."""
    model.eval()
    loss, right, count = 0.0, 0, 0
    for batch in held_out:
        logits, targets = predict(batch)
        loss += F.cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(1) == targets).sum())
        count += len(targets)
    return loss / count, 100 * right / count


def apply_policies(model: nn.Module, setting: Setting) -> dict[str, dsq.stash.Controller]:
    """Put the setting's policies on the model, in place. Returns their controllers by name."""
    controllers = {}
    for policy, options in setting.policies.items():
        if policy == "packed_checkpoint":
            for block in blocks(model):
                block.forward = partial(dsq.stash.packed_checkpoint, block.forward)  # type: ignore[method-assign]
        else:
            values = {name: None if value == "None" else value for name, value in options.items()}
            controllers[policy] = dsq.stash.apply(model, policy, **values)
    return controllers


def convert(model: nn.Module, setting: Setting, updates: int) -> dsq.DynamicPrecision | None:
    """Convert the model to the setting's levels, in place. Returns what counts the updates of a schedule."""
    if not setting.levels:
        return None
    return dsq.DynamicPrecision(model, dsq.DSQConfig(setting.levels, **setting.converting), updates)


def blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of every list of blocks: children with submodules of an nn.ModuleList or nn.Sequential, which are
    no lists themselves.

    Raises ValueError where there are none.
    """
    lists = [module for module in model.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    children = [child for container in lists for child in container if not isinstance(child, nn.ModuleList)]
    candidates = [child for child in children if any(True for _ in child.children())]
    inner = {module for block in candidates for module in block.modules() if module is not block}
    outer = [block for block in candidates if block not in inner]
    if not outer:
        raise ValueError("the model has no list of blocks to checkpoint")
    return outer


def autocast(setting: Setting, device: str = "cpu") -> AbstractContextManager[Any]:
    """PyTorch's autocast to bfloat16 on that kind of device, if the setting asks for it."""
    return torch.autocast(device, torch.bfloat16) if setting.autocast else nullcontext()


def under(setting: Setting, problem: Problem) -> Callable[[Any], tuple[Tensor, Tensor]]:
    """The problem's prediction under the setting's autocast, with logits in float32."""
    device = next(problem.model.parameters()).device.type

    def run(batch: Any) -> tuple[Tensor, Tensor]:
        with autocast(setting, device):
            logits, targets = problem.predict(batch)
        return logits.float(), targets

    return run
