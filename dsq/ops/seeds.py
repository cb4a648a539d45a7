"""The seed of a call, and offsets to it: no two tensors in it share random numbers."""

import sys
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx


class SeedOffset:
    """The offset of each operand of a layer's products, and of the signs of a Hadamard transform, which both operands
    of a product share."""

    X, W, X_FOR_DW, W_FOR_DX, DY_FOR_DX, DY_FOR_DW, DX, SIGNS = range(8)
    NUMBER = 8  #: of seeds that one call may take


def draw() -> int:
    """Draw the seed of a call from torch's default generator.

    Without gradients the generator stays as it is, so that evaluations do not change a training, except in the forward
    of a reentrant checkpoint, whose recomputation draws the same numbers.
    """
    keeps = not (torch.compiler.is_compiling() or torch.is_grad_enabled() or _in_autograd_function())
    generator = torch.default_generator.clone_state() if keeps else None
    # int() is no node of an exported graph
    seed: Any = torch.randint(2**62, (), generator=generator, device="cpu").item()
    return seed  # type: ignore[no-any-return]


def _in_autograd_function() -> bool:
    """Return whether a frame is the forward of an autograd function, whose first argument, ``ctx``, is its context."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not (
        frame.f_code.co_varnames[:1] == ("ctx",) and isinstance(frame.f_locals.get("ctx"), FunctionCtx)
    ):
        frame = frame.f_back
    return frame is not None
