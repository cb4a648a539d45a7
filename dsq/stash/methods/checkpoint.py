"""Activation checkpointing (Chen et al., 2016): save the inputs of segments, recompute the rest in the backward.

Segments are PyTorch's (torch.utils.checkpoint). The policies that were active around the forward are active around the
recomputation too (interception.py): `apply(model, "checkpoint")` and `apply(model, "bfp")` leave packed segment inputs,
and one packed segment at a time. ``packed_checkpoint`` packs the inputs alone, without a policy.

Buffers are updated once: the recomputation runs on copies of them (PyTorch's own moves batch norm's twice).

A rounded input moves all that is recomputed from it: ReLUs near 0 open or close (docs/stash-policies.md).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from dsq.arguments import pattern
from dsq.formats import DEFAULT, Format, format_class
from dsq.ops.torch_checkpoint import in_backward, segment_now
from dsq.stash.controller import Controller
from dsq.stash.memory import place, weak
from dsq.stash.policy import register
from dsq.stash.saved_forms import Coded, Decode, SavedForm, encode_blocks
from dsq.stash.segment_inputs import code_inputs


@register("checkpoint", composes_with=("selective", "wtacrs", "mesa", "bfp", "gact"))
def attach(model: nn.Module, *, segments: str | None = None) -> Controller:
    """Checkpoint every segment of the model.

    Args:
        segments: regular expression; modules whose whole name it matches are segments. None: the blocks of the longest
            nn.ModuleList or nn.Sequential, that is, those of its elements that have submodules.
    Raises:
        ValueError: segments is no regular expression, or there is no such module.
    """
    if segments is None:
        modules = _blocks(model)
    else:
        segment = pattern("segments", segments)
        modules = {name: module for name, module in model.named_modules() if name and segment.fullmatch(name)}
    if not modules:
        rule = "has no nn.ModuleList or nn.Sequential of blocks" if segments is None else f"has no module {segments!r}"
        raise ValueError(f"nothing to stash: the model {rule}; segments takes a regular expression of module names")
    controller = Checkpointing(model, attached=tuple(modules))
    for module in modules.values():
        module.__dict__["forward"] = partial(_checkpointed, module)
    return controller


def _blocks(model: nn.Module) -> dict[str, nn.Module]:
    blocks = [
        {f"{name}.{child}".lstrip("."): m for child, m in parent.named_children() if any(True for _ in m.children())}
        for name, parent in model.named_modules()
        if isinstance(parent, (nn.ModuleList, nn.Sequential))
    ]
    return max(blocks, key=len, default={})


class Checkpointing(Controller):
    """The policy at work. `dsq.stash.measure` counts what segments save, and so does a policy that packs it."""

    def restore(self, module: nn.Module) -> None:
        if getattr(module.__dict__.get("forward"), "func", None) is _checkpointed:
            del module.__dict__["forward"]


def _checkpointed(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the forward of a segment (a partial of this, which is copied with its module)."""
    forward = type(module).forward
    if not torch.is_grad_enabled():
        return forward(module, *args, **kwargs)
    # transformers' keys and values
    if any(hasattr(type(argument), "get_seq_length") for argument in (*args, *kwargs.values())):
        text = f"a checkpointed segment ({type(module).__name__}) would fill its cache again when it is recomputed"
        raise RuntimeError(f"{text}: call the model with use_cache=False")
    leaves, spec = tree_flatten((args, kwargs))

    def run(*leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, spec)
        buffers = {name: buffer.clone() for name, buffer in module.named_buffers()} if in_backward() else {}
        with _reparametrize_module(module, buffers):
            return forward(module, *args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False)


# ---- for whoever calls torch.utils.checkpoint ----

FOUR_BITS = format_class(DEFAULT)(4)


def packed_checkpoint(function: Callable[..., Any], *args: Any, fmt: Format = FOUR_BITS, **kwargs: Any) -> Any:
    """Run ``torch.utils.checkpoint.checkpoint(function, *args, **kwargs)``, with hidden states saved in ``fmt``.

        x = packed_checkpoint(block, x)                                                     # in one's own forward
        model._set_gradient_checkpointing(gradient_checkpointing_func=packed_checkpoint)    # a model of transformers

    Packed are the first of ``args`` and those of its rank and width, where they need a gradient: 4.5 bits a value at 4
    bits, blocks over neighbors in memory. Others, as masks and position biases, are saved as they are. The forward is
    that of plain checkpointing, bit for bit; the backward recomputes each segment from the rounded input. What is
    recomputed is not packed: the policy "checkpoint" with "bfp" does that too.

    Args:
        function: a segment; args: its inputs; kwargs: those of torch's checkpoint.
        fmt: a format of dsq; wider than 16 bits: inputs stay as they are.
    Raises:
        TypeError: ``fmt`` is no format. ValueError: ``use_reentrant`` is True. RuntimeError: a backward with
            create_graph=True.
    """
    if not isinstance(fmt, Format):
        raise TypeError(f"fmt must be a format, as dsq.BFP(4), got {fmt!r}")
    if kwargs.pop("use_reentrant", False):
        raise ValueError("use_reentrant must be False: reentrant checkpoints save their inputs as they are")

    def run(*inputs: Any, **options: Any) -> Any:
        segment = segment_now()  # None where it is recomputed
        if segment is not None and fmt.packs:
            code_inputs(segment, lambda x: _coded(x, fmt))
        return function(*inputs, **options)

    return checkpoint(run, *args, use_reentrant=False, **kwargs)


@dataclass(eq=False)
class _CodedInput:
    """An input of segments, in codes, for as long as one of the segments has its ``decode``."""

    codes: tuple[Tensor, ...]
    decoder: Decode
    source: StorageWeakRef  #: while it lives no other storage has the address by which the input is known

    def decode(self, codes: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        return self.decoder(codes, dtype)


#: by memory, order and format: an input of many segments (the encoder's output, to a decoder's blocks) is coded once
_inputs: WeakValueDictionary[Any, _CodedInput] = WeakValueDictionary()


def _coded(x: Tensor, fmt: Format) -> SavedForm:
    memory, order, values = place(x)
    key = memory, order, fmt
    coded_input = _inputs.get(key)
    if coded_input is None:
        coded_input = _inputs[key] = _CodedInput(*encode_blocks(values, fmt), weak(x))
    return SavedForm(coded_input.codes, Coded(coded_input.decode, x.dtype, order))
