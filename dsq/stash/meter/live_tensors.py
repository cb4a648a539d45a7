"""The tensors that are alive, as Python's collector knows them: what was there before a forward, and what hides."""

import gc
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef


def live_tensors() -> Iterator[Tensor]:
    """Every tensor with a storage that is alive, those among them that only C++ holds; a compiler's have none."""
    for thing in gc.get_objects():
        kind = type(thing)
        if issubclass(kind, Tensor) and not issubclass(kind, FakeTensor) and thing.layout is torch.strided:
            yield thing


class StoragesBefore:
    """The storages alive now; while this lives, no later one gets the address of one of them."""

    def __init__(self) -> None:
        refs = [StorageWeakRef(tensor.untyped_storage()) for tensor in live_tensors()]
        self._refs = {ref.cdata: ref for ref in refs}

    @property
    def storages(self) -> set[int]:
        """Their keys (untyped_storage()._cdata)."""
        return set(self._refs)


def hidden_leaves(before: StoragesBefore) -> list[Tensor]:
    """Leaves made since that need a gradient and that no Python object refers to.

    One that a hook packed is kept beside its packed form by the node that accumulates its gradient, which the walk of a
    graph does not reach: the node that saved it does not name that one.
    """
    known = before.storages
    young = [
        tensor
        for tensor in live_tensors()
        if tensor.is_leaf and tensor.requires_grad and tensor.untyped_storage()._cdata not in known
    ]
    # the list above is one referrer; a function's own names are none
    return [t for t in young if not isinstance(t, nn.Parameter) and len(gc.get_referrers(t)) <= 1]
