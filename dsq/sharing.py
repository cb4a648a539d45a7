"""One stash for all layers that read the same input: q, k and v of an attention, or a decoder's view of the encoder."""

from torch import Tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from dsq import kernels
from dsq.kernels import Grid

#: input -> (its version, how it was packed, weak references to codes and exponents); nothing is kept alive by it
_stashes = WeakTensorKeyDictionary()


def shared_stash(
    source: Tensor, x_TK: Tensor, grid: Grid | None, dim: int, seed: int | None
) -> tuple[Tensor, Tensor | None]:
    """Codes and exponents of ``x_TK``: those of an earlier call with the same ``source`` where they are still alive.

    ``source`` is the tensor object that the layers were given, of which ``x_TK`` is a reshaped (or autocast) copy or
    view. Without a grid ``x_TK`` itself is kept.
    """
    if grid is None:
        return x_TK.detach(), None
    # version and memory: x.data = other leaves the version; a nearest layer must not take a stochastic one's codes
    memory = (source.untyped_storage()._cdata, source.storage_offset(), source.shape)
    how = (source._version, memory, grid, dim, x_TK.dtype, seed is None)
    entry = _stashes.get(source)
    if entry is not None and entry[0] == how:
        codes, exponents = entry[1](), entry[2]()
        if codes is not None and exponents is not None:
            return codes, exponents
    codes, exponents = kernels.pack(x_TK, grid, dim, seed)
    _stashes[source] = (how, TensorWeakRef(codes), TensorWeakRef(exponents))
    return codes, exponents
