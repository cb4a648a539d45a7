"""The inputs of a segment of torch.utils.checkpoint, which dsq saves in codes: private parts of PyTorch, as in
dsq/ops/torch_checkpoint.py."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CellType
from typing import Any

from torch import Tensor
from torch._C._autograd import SavedTensor
from torch.utils.checkpoint import _CheckpointFrame

from dsq.ops.torch_checkpoint import MODULE
from dsq.stash.saved_forms import Saved, SavedForm, read, refuse_create_graph, split


def inputs_of(segment: Any) -> list[Any]:
    """Return the inputs as PyTorch saves them; none where ``code_inputs`` took them, and in PyTorch 2.11."""
    return getattr(segment, "saved_args", [])


def code_inputs(segment: Any, code: Callable[[Tensor], Saved]) -> bool:
    """Save the hidden states among the inputs of ``segment`` by ``code``: its first tensor, and those of the same rank
    and width. Return whether it did.

    Inputs that went through hooks stay there. They may unpack a tensor once, and in a backward alone (TRL's
    ``activation_offloading``). An outer segment's save nothing, and would recompute it here, in its own forward.
    """
    arguments = inputs_of(segment)
    if not arguments or any(getattr(argument, "unpack_hook", None) is not None for argument in arguments):
        return False
    saved: list[Any] = []
    layout = None
    for argument in arguments:
        x = argument.unpack() if isinstance(argument, SavedTensor) else None
        layout = layout or (None if x is None else (x.dim(), *x.shape[-1:]))
        hidden = x is not None and x.grad_fn is not None and (x.dim(), *x.shape[-1:]) == layout
        form = code(x) if x is not None and hidden else None
        saved.append(form if isinstance(form, SavedForm) else argument)
    set_inputs(segment, saved)
    return True


def set_inputs(segment: Any, inputs: list[Any]) -> None:
    """Let ``segment`` be recomputed from ``inputs``: values, SavedTensors and SavedForms."""
    segment.get_inputs, segment.saved_args = SegmentInputs(inputs), []


@dataclass(frozen=True)
class SegmentInputs:
    """The inputs of a segment, hidden states in codes."""

    inputs: list[Any]  #: values, SavedTensors, and SavedForms of tensors that want a gradient

    def __call__(self) -> list[Any]:
        return [self._value(item) for item in self.inputs]

    def _value(self, item: Any) -> Any:
        if isinstance(item, SavedTensor):
            return item.unpack()
        if isinstance(item, SavedForm):
            refuse_create_graph()
            return read(*split((item,)))[0][0].detach().requires_grad_()
        return item


def saved_behind(hook: Any) -> tuple[Any, ...]:
    """Return the inputs and the variables from which a segment would be recomputed, given the hook that unpacks a
    tensor of it; () for other hooks."""
    if getattr(hook, "__module__", None) != MODULE:
        return ()
    segment = next(cell for cell in _cells(hook) if isinstance(cell, _CheckpointFrame))
    recompute = segment.recompute_fn
    recompute = recompute.args[-1] if isinstance(recompute, partial) else recompute  # under policies
    return inputs_of(segment), getattr(segment, "get_inputs", None), _cells(recompute)


def _cells(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
