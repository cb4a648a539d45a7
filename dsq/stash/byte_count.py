"""Bytes that a forward saves for its backward."""

from collections.abc import Sequence

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.ops.shared_inputs import version
from dsq.stash.memory import weak


class ByteCount:
    """Bytes of the tensors that came to be saved, weights aside, and bytes saved in their place.

    A segment of a checkpoint saves nothing beyond its own forward: while ``paused`` nothing is counted.
    """

    def __init__(self) -> None:
        self.raw = 0
        self.saved = 0
        self.paused = False
        self.exact: dict[tuple[int, object], StorageWeakRef] = {}  #: tensors of this forward counted as they are

    def add(self, raw: int, tensors: Sequence[Tensor]) -> None:
        """Count ``raw`` bytes, and ``tensors`` saved for them."""
        if not self.paused:
            self.raw += raw
            for tensor in tensors:
                self.saved += tensor.nbytes

    def add_exact(self, x: Tensor) -> None:
        """Count ``x``, which is saved as it is, once for its storage and version."""
        key = x.untyped_storage()._cdata, version(x)
        if key not in self.exact:
            self.exact[key] = weak(x)
            self.add(x.nbytes, (x,))
