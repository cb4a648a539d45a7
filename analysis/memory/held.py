"""Bytes that one model holds by each method, as JSON; run under the counting malloc (analysis.stash.allocator)."""

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import dsq
from analysis.memory.methods import METHODS, CheckedMethod
from analysis.memory.models import FAIRSEQ, LARGE, checked_model
from analysis.stash.allocator import step_bytes

#: the methods of a model that is not trained by all. The large one takes a minute for each; fairseq scales queries in
#: place, which autograd forbids of what the functions of mesa and wtacrs put out
ONLY = {
    LARGE: ["fp32", "bfp 4"],
    FAIRSEQ: [method.name for method in METHODS if method.policy not in ("mesa", "wtacrs")],
}


def attached(model: nn.Module, method: CheckedMethod) -> nn.Module:
    if method.frozen:
        for module in model.modules():
            if isinstance(module, (nn.Linear, Conv1D)):
                module.requires_grad_(False)
    if method.levels:
        model = dsq.convert(model.bfloat16(), dsq.DSQConfig(levels=method.levels, tied=True))
    if method.policy:
        dsq.stash.apply(model, method.policy, **method.options)
    return model


def forward(loss: Callable[[], Tensor], method: CheckedMethod) -> Callable[[], Tensor]:
    def run() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16) if method.autocast else nullcontext():
            return loss()

    return run


def main(name: str) -> None:
    torch.set_num_threads(1)
    held = {}
    for method in METHODS:
        if method.name not in ONLY.get(name, [method.name]):
            continue
        made = checked_model(name)
        attached(made.model, method)
        held[method.name] = asdict(step_bytes(forward(made.loss, method)))
    print(json.dumps(held))


if __name__ == "__main__":
    main(sys.argv[1])
