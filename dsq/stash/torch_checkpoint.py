"""The private parts of torch.utils.checkpoint that dsq reads and sets, all in this file.

A segment of a checkpoint with ``use_reentrant=False`` is a ``_CheckpointFrame``. While its forward runs, the innermost
hooks on saved tensors are its own: their pack function closes over the frame alone. dsq finds the segment by that
function, lets it be recomputed under the policies of its forward, and saves its inputs in codes. The public API has no
place for the latter two.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import SavedTensor
from torch.utils.checkpoint import _checkpoint_hook, _CheckpointFrame

from dsq.stash.functions import refuse_create_graph
from dsq.stash.saved_forms import Saved, SavedForm, read, split

#: () -> the (pack, unpack) that a tensor saved now would go through; None: PyTorch saves it as it is
innermost_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)

_MODULE = torch.utils.checkpoint.__name__
_ATTRIBUTES: tuple[str, ...] = ("recompute_fn", "forward_completed")
if torch.__version__ >= "2.13":  # 2.11, which some GPU images have, saves inputs elsewhere: there they stay exact
    _ATTRIBUTES += ("saved_args", "get_inputs")


def _pack_code() -> tuple[Any, str]:
    """Return (code of the pack function, "") or (None, the private part that this PyTorch has not)."""
    try:
        frame = _CheckpointFrame(None, True, None, None)
        pack = _checkpoint_hook(frame).pack_hook
    except (TypeError, AttributeError) as error:
        return None, str(error)
    missing = [f"_CheckpointFrame.{name}" for name in _ATTRIBUTES if not hasattr(frame, name)]
    if not isinstance(pack, FunctionType) or [cell.cell_contents for cell in pack.__closure__ or ()] != [frame]:
        missing.append("_checkpoint_hook.pack_hook of a frame alone")
    return getattr(pack, "__code__", None), ", ".join(missing)


_PACK, _MISSING = _pack_code()
_UNKNOWN = f"dsq.stash does not know the checkpoints of PyTorch {torch.__version__}: use PyTorch 2.13; missing"


def segment_now() -> Any:
    """Return the segment of torch.utils.checkpoint whose forward this thread is in; None outside of all, and where a
    segment is recomputed.

    Raises RuntimeError if this PyTorch's checkpoints are made of other parts than this file knows.
    """
    top = innermost_hooks()
    pack = None if top is None else top[0]
    if _MISSING and getattr(pack, "__module__", "") == _MODULE:
        raise RuntimeError(f"{_UNKNOWN} {_MISSING}")
    if not isinstance(pack, FunctionType) or pack.__code__ is not _PACK:
        return None
    return pack.__closure__[0].cell_contents  # type: ignore[index]


def is_open(segment: Any) -> bool:
    """Return whether the forward of ``segment`` still runs; outer segments stay open while inner ones run."""
    return not segment.forward_completed


def is_wrapped(segment: Any, run: Callable[..., Any]) -> bool:
    """Return whether ``recompute_under`` was given the segment before."""
    return getattr(segment.recompute_fn, "func", None) is run


def recompute_under(segment: Any, run: Callable[..., Any], *args: Any) -> None:
    """Let ``segment`` be recomputed by ``run(*args, recomputation, *inputs)``."""
    segment.recompute_fn = partial(run, *args, segment.recompute_fn)


def exact_inputs(segment: Any) -> list[Any]:
    """Return the inputs as PyTorch saves them; none where ``code_inputs`` took them, and in PyTorch 2.11."""
    return getattr(segment, "saved_args", [])


def code_inputs(segment: Any, code: Callable[[Tensor], Saved]) -> bool:
    """Save the hidden states among the inputs of ``segment`` by ``code``: its first tensor, and those of the same rank
    and width. Return whether it did.

    Inputs that went through hooks stay there. They may unpack a tensor once, and in a backward alone (TRL's
    ``activation_offloading``). An outer segment's save nothing, and would recompute it here, in its own forward.
    """
    arguments = exact_inputs(segment)
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
    if getattr(hook, "__module__", None) != _MODULE:
        return ()
    segment = next(cell for cell in _cells(hook) if isinstance(cell, _CheckpointFrame))
    recompute = segment.recompute_fn
    recompute = recompute.args[-1] if isinstance(recompute, partial) else recompute  # under policies
    return exact_inputs(segment), getattr(segment, "get_inputs", None), _cells(recompute)


def _cells(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
