"""The private parts of torch.utils.checkpoint by which dsq follows a segment (those of its inputs:
dsq/stash/segment_inputs.py).

A segment of a checkpoint with ``use_reentrant=False`` is a ``_CheckpointFrame``. While its forward runs, the innermost
hooks on saved tensors are its own: their pack function closes over the frame alone. dsq finds the segment by that
function, and lets it be recomputed under the policies, and at the level, of its forward. The public API has no place
for these.
"""

from collections.abc import Callable
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch.utils.checkpoint import _checkpoint_hook, _CheckpointFrame

#: () -> the (pack, unpack) that a tensor saved now would go through; None: PyTorch saves it as it is
innermost_hooks: Callable[[], Any] = partial(torch._C._autograd._top_saved_tensors_default_hooks, True)

MODULE = torch.utils.checkpoint.__name__
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
KNOWN = not _MISSING  #: whether PyTorch's checkpoints are made of the parts that this file knows
_UNKNOWN = f"dsq does not know the checkpoints of PyTorch {torch.__version__}: use PyTorch 2.13; missing"


def segment_now() -> Any:
    """Return the segment of torch.utils.checkpoint whose forward this thread is in; None outside of all, and where a
    segment is recomputed.

    Raises RuntimeError if this PyTorch's checkpoints are made of other parts than this file knows.
    """
    top = innermost_hooks()
    pack = None if top is None else top[0]
    if _MISSING and getattr(pack, "__module__", "") == MODULE:
        raise RuntimeError(f"{_UNKNOWN} {_MISSING}")
    if not isinstance(pack, FunctionType) or pack.__code__ is not _PACK:
        return None
    return pack.__closure__[0].cell_contents  # type: ignore[index]


def in_backward() -> bool:
    """Return whether a backward is running in this thread: what is saved now is a recomputation's."""
    return torch._C._current_graph_task_id() != -1


def is_open(segment: Any) -> bool:
    """Return whether the forward of ``segment`` still runs; outer segments stay open while inner ones run."""
    return not segment.forward_completed


def is_wrapped(segment: Any, run: Callable[..., Any]) -> bool:
    """Return whether ``recompute_under`` was given the segment before."""
    return getattr(segment.recompute_fn, "func", None) is run


def recompute_under(segment: Any, run: Callable[..., Any], *args: Any) -> None:
    """Let ``segment`` be recomputed by ``run(*args, recomputation, *inputs)``."""
    segment.recompute_fn = partial(run, *args, segment.recompute_fn)


def refuse_other_level(level: object, level_of_forward: object) -> None:
    """Raise RuntimeError where a segment is recomputed at another level than ``level_of_forward``, that of its forward.

    Its saved tensors would be other ones.
    """
    if level != level_of_forward:
        text = "the precision level must not change between the forward of a checkpoint and its backward"
        raise RuntimeError(f"{text}: call dynamic.record() and dynamic.step() after backward()")


def hold_level(layer: Any) -> None:
    """Let the segment that calls ``layer``, a dsq.quantizers.Quantized, be recomputed at its present level alone.

    Under a stash policy the policy's mode does it (dsq/stash/interception.py).
    """
    segment = segment_now() if KNOWN and not torch._C._is_torch_function_mode_enabled() else None
    if segment is not None and not is_wrapped(segment, _recompute_at_level):
        recompute_under(segment, _recompute_at_level, layer, layer.quantizers_text)


def _recompute_at_level(layer: Any, text: str, run: Callable[..., Any], *inputs: Any) -> Any:
    refuse_other_level(layer.quantizers_text, text)
    return run(*inputs)
