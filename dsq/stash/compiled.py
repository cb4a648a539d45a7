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


def forget_compiled() -> None:
    """Let compiled code be made again: what was made before a policy knows no hook, and asks for none."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Let compiled modules run as they were before: a mode that sees every operation sees none inside of a graph."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


def inside_compiled() -> bool:
    """Whether torch.compile traces the code that runs now, or left it out of a graph, of which it does not tell."""
    if torch.compiler.is_compiling():
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    frame = None if dynamo is None else sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "compile_wrapper" and frame.f_code.co_filename == dynamo.__file__:  # type: ignore[union-attr]
            return True
        frame = frame.f_back
    return False
