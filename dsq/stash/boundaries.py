"""Activation checkpointing whose segments' inputs are packed, for whoever calls torch.utils.checkpoint.

    x = packed_checkpoint(block, x)                                                         # in one's own forward
    model._set_gradient_checkpointing(gradient_checkpointing_func=packed_checkpoint)        # a model of transformers

Only what crosses the boundaries changes: the policy "checkpoint" with "bfp" packs the recomputed tensors too, for a
lower peak, and finds the segments by itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from dsq.formats import DEFAULT, Format, format_class
from dsq.packing import Packed, pack
from dsq.stash.hooks import innermost_hooks, refuse_create_graph
from dsq.stash.memory_order import MemoryOrder, span
from dsq.stash.storages import StorageCache, is_plain, storage_key, weak

FOUR_BITS = format_class(DEFAULT)(4)
#: an input of many segments (the encoder's output, to a decoder's blocks) is packed once
_made: StorageCache[Packed] = StorageCache()


def packed_checkpoint(function: Callable[..., Any], *args: Any, fmt: Format = FOUR_BITS, **kwargs: Any) -> Any:
    """``torch.utils.checkpoint.checkpoint(function, *args, **kwargs)`` that keeps hidden states in the bits of ``fmt``.

    Packed are the first of ``args`` and those of its rank and width, where they need a gradient: 4.5 bits a value at 4
    bits, boxes over neighbours in memory. Others, as masks and position biases, are kept as they are. The forward is
    that of plain checkpointing, bit for bit; the backward recomputes each segment from the rounded input.

    Args:
        function: a segment; args: its inputs; kwargs: those of torch's checkpoint, ``use_reentrant`` False by default.
        fmt: a format of dsq; wider than 16 bits: inputs stay as they are.
    Raises:
        TypeError: ``fmt`` is no format. RuntimeError: a backward with create_graph=True.
    """
    if not isinstance(fmt, Format):
        raise TypeError(f"fmt must be a format, as dsq.BFP(4), got {fmt!r}")
    layout = _rank_and_width(next((x for x in args if isinstance(x, Tensor)), None))

    outer_pack, outer_unpack = innermost_hooks() or (_itself, _itself)

    def pack_one(x: Tensor) -> Any:
        wanted = x.is_floating_point() and x.grad_fn is not None and is_plain(x) and fmt.packs
        return _packed(x, fmt) if wanted and _rank_and_width(x) == layout else outer_pack(x)

    def unpack_one(kept: Any) -> Tensor:
        return kept.get() if isinstance(kept, _Boundary) else outer_unpack(kept)

    with saved_tensors_hooks(pack_one, unpack_one):
        return checkpoint(function, *args, **{"use_reentrant": False, **kwargs})


def _itself(x: Tensor) -> Tensor:
    return x


def _rank_and_width(x: Tensor | None) -> tuple[int, ...]:
    return () if x is None or not x.dim() else (x.dim(), x.shape[-1])


@dataclass(eq=False, slots=True)
class _Boundary:
    """A packed input, as one segment saw it."""

    packed: Packed
    order: MemoryOrder

    def get(self) -> Tensor:
        refuse_create_graph()
        return self.order.restore(self.packed.unpack())


def _packed(x: Tensor, fmt: Format) -> _Boundary:
    order, values = MemoryOrder.of(x)
    key = (*storage_key(x), *span(values), fmt)
    found = _made.get(key)
    if found is None:
        found = pack(values.reshape(-1), fmt)
        _made.put(key, found, weak(x))
    return _Boundary(found, order)
