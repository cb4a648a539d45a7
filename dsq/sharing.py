"""One stash for all layers that read the same input: q, k and v of an attention, or a decoder's view of the encoder."""

from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from dsq.kernels import Codes, Factor, plain


class _Shared(NamedTuple):
    source: ref[Tensor]  #: never read: its callback forgets the stash with the tensor
    how: tuple
    #: weak, so nothing is kept alive; and of storages, because saved-tensor hooks may keep other tensors of them
    codes: ref[torch.UntypedStorage]
    exponents: ref[torch.UntypedStorage]
    shapes: tuple[torch.Size, torch.Size, torch.Size]


#: by the identity of the tensor that the layers were given
_stashes: dict[int, _Shared] = {}


def how_packed(source: Tensor, dtype: torch.dtype, factor: Factor, seed: int | None) -> tuple:
    """What two stashes of ``source`` have in common where one may serve as both.

    Noticed are changes in place, and ``x.data = other`` where the other has memory of its own. Not noticed, while an
    earlier graph lives, are values written past autograd (``x.data.copy_``, numpy).
    """
    memory = (source.untyped_storage()._cdata, source.storage_offset(), source.shape, source.stride())
    # a nearest layer must not take a stochastic one's codes
    return (source._version, memory, factor.grid, factor.dim, dtype, seed is None)


def shared(source: Tensor, how: tuple) -> Codes | None:
    """The stash of an earlier layer that was given ``source``, the tensor object itself, where it is still alive."""
    found = _stashes.get(id(source))
    if found is None or found.how != how:
        return None
    codes, exponents = found.codes(), found.exponents()
    if codes is None or exponents is None:
        return None
    code_shape, exponent_shape, shape = found.shapes
    return Codes(_bytes(codes, code_shape), _bytes(exponents, exponent_shape), shape)


def share(source: Tensor, how: tuple, stash: Codes) -> None:
    """Let later layers that are given ``source`` have ``stash``, unless a mode or a special tensor would see them."""
    codes, exponents, shape = stash
    if not plain(codes):
        return
    key = id(source)
    _stashes[key] = _Shared(
        ref(source, lambda _: _stashes.pop(key, None)),
        how,
        ref(codes.untyped_storage()),
        ref(exponents.untyped_storage()),
        (codes.shape, exponents.shape, shape),
    )


def _bytes(storage: torch.UntypedStorage, shape: torch.Size) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(shape)
