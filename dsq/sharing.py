"""One stash for all layers that read the same input: q, k and v of an attention, or a decoder's view of the encoder."""

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.weak import WeakTensorKeyDictionary

from dsq import kernels
from dsq.kernels import Grid

#: input -> (its version and how it was packed, codes, exponents), both as a storage and a shape; nothing is kept alive
#: by it, and while the storage lives it does not matter which tensor keeps it: saved-tensor hooks keep others
_stashes = WeakTensorKeyDictionary()


def shared_stash(
    source: Tensor, x_TK: Tensor, grid: Grid | None, dim: int, seed: int | None
) -> tuple[Tensor, Tensor | None]:
    """Codes and exponents of ``x_TK``: those of an earlier call with the same ``source`` where they are still alive.

    ``source`` is the tensor object that the layers were given, of which ``x_TK`` is a reshaped (or autocast) copy or
    view. Without a grid ``x_TK`` itself is kept. A change of the input that autograd is not told of (``x.data``, numpy)
    while an earlier graph of it lives is not noticed.
    """
    if grid is None:
        return x_TK.detach(), None
    # version and memory: x.data = other leaves the version; a nearest layer must not take a stochastic one's codes
    memory = (source.untyped_storage()._cdata, source.storage_offset(), source.shape)
    how = (source._version, memory, grid, dim, x_TK.dtype, seed is None)
    entry = _stashes.get(source)
    if entry is not None and entry[0] == how:
        codes, exponents = _alive(*entry[1]), _alive(*entry[2])
        if codes is not None and exponents is not None:
            return codes, exponents
    codes, exponents = kernels.pack(x_TK, grid, dim, seed)
    _stashes[source] = (how, *((StorageWeakRef(t.untyped_storage()), t.shape) for t in (codes, exponents)))
    return codes, exponents


def _alive(reference: StorageWeakRef, shape: torch.Size) -> Tensor | None:
    """The bytes in a storage, if it still is one."""
    storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)
    if storage is None:
        return None
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).view(shape)
