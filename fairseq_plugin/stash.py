"""How many bytes the converted linears really keep between forward and backward."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import dsq


@dataclass
class Measured:
    """The stash of one forward pass. A tensor that several layers share counts once, in both numbers."""

    stash_bytes: int = 0  #: the tensors that the converted linears saved for their backward
    stash_bytes_fp32: int = 0  #: what plain linears would have saved of the same inputs: the inputs, 4 bytes a value
    linears_called: int = 0  #: converted linears that ran


@contextlib.contextmanager
def measured(model: nn.Module) -> Iterator[Measured]:
    """Measure the forward passes of ``model`` within the block; the result is complete when the block ends.

    Counts what autograd is handed, through its own saved-tensor hooks. Parameters are no stash.
    """
    result = Measured()
    # keyed by where the bytes lie; the tensors are held, so that no address is used twice
    saved: dict[tuple[int, int], Tensor] = {}
    inputs: dict[tuple[int, int], Tensor] = {}
    called: set[nn.Module] = set()
    open_forwards: list[contextlib.AbstractContextManager] = []

    def before(linear: dsq.Linear, args: tuple[Tensor, ...]) -> None:
        def keep(tensor: Tensor) -> Tensor:
            if tensor.data_ptr() != linear.weight.data_ptr():
                saved[tensor.data_ptr(), tensor.nbytes] = tensor
            return tensor

        called.add(linear)
        if torch.is_grad_enabled():  # with --checkpoint-activations a layer runs first without, and again with
            x = args[0]
            inputs[x.data_ptr(), x.numel()] = x.detach()
        open_forwards.append(saved_tensors_hooks(keep, lambda tensor: tensor))
        open_forwards[-1].__enter__()

    def after(*_: object) -> None:
        open_forwards.pop().__exit__(None, None, None)

    handles = []
    for linear in dsq.converted(model).values():
        handles += [linear.register_forward_pre_hook(before), linear.register_forward_hook(after)]
    try:
        yield result
    finally:
        for handle in handles:
            handle.remove()
    result.stash_bytes = sum(tensor.nbytes for tensor in saved.values())
    result.stash_bytes_fp32 = sum(4 * x.numel() for x in inputs.values())
    result.linears_called = len(called)
