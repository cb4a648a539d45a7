"""The forms that a forward has of pieces of memory, so that a tensor is coded once, whatever views of it are saved."""

from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.ops.shared_inputs import SharedInputs
from dsq.stash.memory import MemoryOrder
from dsq.stash.saved_forms import Recomputed, SavedForm, Shared

#: storage, version, and what tells the tensor from others of its storage (dsq.stash.memory.place)
Key = tuple[object, ...]


class CachedForm(NamedTuple):
    """The form of a piece of memory."""

    form: SavedForm
    order: MemoryOrder  #: in which the form lays the values out
    source: StorageWeakRef  #: while it lives no other storage has the address that the key names

    def seen_as(self, order: MemoryOrder) -> SavedForm:
        """Return the form of a view that lays the values out in ``order``."""
        tensors, decoder = self.form
        cached_order = self.order
        if order is cached_order:
            return self.form
        sources = ((len(tensors), decoder),)
        return SavedForm(
            tensors, Shared(Recomputed(lambda value: order.restore(cached_order.flat(value)), sources, None))
        )


class FormCache:
    """Forms by memory, the codes that linear layers share, and the memory that is to stay exact."""

    def __init__(self) -> None:
        self.forms: dict[Key, CachedForm] = {}
        self.inputs = SharedInputs()
        self.exact: dict[tuple[int, object], StorageWeakRef] = {}  #: by storage and version

    def drop(self, x: Tensor) -> None:
        """Forget the forms of the memory of ``x``, and its codes."""
        self.inputs.drop(x)
        storage = x.untyped_storage()._cdata
        for key in [key for key in self.forms if key[0] == storage]:
            del self.forms[key]
