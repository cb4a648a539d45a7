"""One stash for all layers that read the same input: q, k and v of an attention, or a decoder's view of the encoder."""

from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from dsq.kernels.backend import Codes, Operand
from dsq.kernels.dispatch import plain

#: what two stashes of one tensor have in common where one may serve as both
StashKey = tuple[object, ...]


class _Shared(NamedTuple):
    source: ref[Tensor]  #: never read: its callback forgets the stash with the tensor
    key: StashKey
    #: weak, so nothing is kept alive; and of storages, because saved-tensor hooks may keep other tensors of them
    codes: ref[torch.UntypedStorage]
    scales: ref[torch.UntypedStorage]
    shapes: tuple[torch.Size, torch.Size, torch.Size]


#: by the identity of the tensor that the layers were given
_stashes: dict[int, _Shared] = {}


def stash_key(source: Tensor, stash: Operand, seed: int | None) -> StashKey:
    """What two stashes of ``source`` have in common where one may serve as both.

    Noticed are changes in place, and ``x.data = other`` where the other has memory of its own. Not noticed, while an
    earlier graph lives, are values written past autograd (``x.data.copy_``, numpy).
    """
    memory = (source.untyped_storage()._cdata, source.storage_offset(), source.shape, source.stride())
    # a nearest layer must not take a stochastic one's codes
    return (source._version, memory, stash.format, stash.axis, source.dtype, seed is None)


def shared(source: Tensor, key: StashKey) -> Codes | None:
    """The stash of an earlier layer that was given ``source``, the tensor object itself, where it is still alive."""
    found = _stashes.get(id(source))
    if found is None or found.key != key:
        return None
    codes, scales = found.codes(), found.scales()
    if codes is None or scales is None:
        return None
    code_shape, scale_shape, shape = found.shapes
    return Codes(_bytes(codes, code_shape), _bytes(scales, scale_shape), shape)


def share(source: Tensor, key: StashKey, stash: Codes) -> None:
    """Let later layers that are given ``source`` have ``stash``, unless a mode or a special tensor would see them."""
    codes, scales, shape = stash
    if not plain(codes):
        return
    source_id = id(source)
    _stashes[source_id] = _Shared(
        ref(source, lambda _: _stashes.pop(source_id, None)),
        key,
        ref(codes.untyped_storage()),
        ref(scales.untyped_storage()),
        (codes.shape, scales.shape, shape),
    )


def _bytes(storage: torch.UntypedStorage, shape: torch.Size) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(shape)
