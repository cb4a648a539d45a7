"""Where torch.compile stands in a model: by name, as importing torch._dynamo to ask takes a second."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn


def compiled_blocks(model: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """The compiled modules of a model, itself perhaps, but for those inside of others; and the attribute of each that
    holds its compiled call.
    """
    left = [model]
    while left:  # before each forward: children() also reads their names
        module = left.pop()
        if type(module).__name__ == "OptimizedModule":
            yield module, "forward"
        elif module._compiled_call_impl is not None:
            yield module, "_compiled_call_impl"
        else:
            left += [child for child in module._modules.values() if child is not None]


def compiled_calls(model: nn.Module) -> set[Callable[..., Any]]:
    """What is called where a compiled block of ``model`` runs."""
    return {getattr(block, name) for block, name in compiled_blocks(model)}


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Let compiled modules run as they were before: a mode that sees every operation sees none inside of a graph."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield
