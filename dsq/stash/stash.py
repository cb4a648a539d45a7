"""The saved tensors of one forward: which are coded, which stay exact, and which the backward recomputes.

The operations whose tensors are coded, and why, are in dsq/stash/rules.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.kernels.backend import FLOATS, Codes, Operand
from dsq.kernels.dispatch import pack_mask, unpack
from dsq.ops.shared_inputs import SharedInputs, version
from dsq.ops.torch_checkpoint import in_backward
from dsq.stash.memory import MemoryOrder, is_weight, may_be_freed, place, weak
from dsq.stash.saved_forms import HELD, Bitmask, Codec, Coded, Recomputed, Saved, SavedForm, Shared, split
from dsq.stash_bits import MAX_EXACT_NUMEL, Role

#: bytes of copies of weights, as a share of those of the tensor that is recomputed from them
_MAX_SHARE_OF_COPIES = 1 / 2
#: operations without a rule that save their result: codes of it would come on top, and an exponential, whose values are
#: of very different sizes, would lose most of them
_SAVE_THEIR_RESULT = {
    f"{name}Backward0" for name in ("Exp", "Exp2", "Sqrt", "Rsqrt", "Reciprocal", "Cumprod", "Logcumsumexp")
}
#: values -> the values that are coded in their place
Prepare = Callable[[Tensor], Tensor]
_NBYTES = attrgetter("nbytes")


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


@dataclass(eq=False)
class FormCache:
    """Forms by memory, the codes that linear layers share, and the memory that is to stay exact."""

    forms: dict[Key, CachedForm] = field(default_factory=dict)
    inputs: SharedInputs = field(default_factory=SharedInputs)
    exact: dict[tuple[int, object], StorageWeakRef] = field(default_factory=dict)  #: by storage and version

    def drop(self, x: Tensor) -> None:
        """Forget the forms of the memory of ``x``, and its codes."""
        self.inputs.drop(x)
        storage = x.untyped_storage()._cdata
        for key in [key for key in self.forms if key[0] == storage]:
            del self.forms[key]


@dataclass(eq=False)
class ByteCount:
    """Bytes of the tensors that came to be saved, weights aside, and bytes saved in their place.

    A segment of a checkpoint saves nothing beyond its own forward: while ``paused`` nothing is counted.
    """

    raw: int = 0
    saved: int = 0
    paused: bool = False
    exact: dict[tuple[int, object], StorageWeakRef] = field(default_factory=dict)  #: tensors counted as they are

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


class Stash:
    """The saved tensors of one forward of a model under a policy.

    A rule asks it in the forward for a form of each tensor x that its backward reads, and hands all forms to ``save``
    (saved_forms.py). Forms are cached by the memory of x and its version, so that a tensor which several operations
    save, or views of it, is coded once:

    code(x, role)          the form that x has, else new codes
    code_repaired(y, ...)  codes whose decoded values a function corrects, as the rows of a softmax
    exact(x), copy(x)      x as it is, or in memory of its own, because its owner may overwrite it
    bitmask(x, ...)        a bit a value: whether it lies between two limits
    register_recomputed    no bytes: note that a result is a function of saved forms
    find(x)                the form that x has already, or None; a view of a recomputed tensor gets one
    find_recomputed(x)     the same, if x is recomputed without codes of its own
    find_input(key, x)     for a quantized linear layer: codes that another layer made of x, else the form that x has
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = self._forward_codec = codec
        self.bytes = ByteCount()
        self.segment: Any = None  #: the checkpoint in whose segment the forward is
        self._cache = self._outer_cache = FormCache()  #: of the segment, and outside of all segments
        self._uncacheable: dict[int, StorageWeakRef] = {}  #: storages that may be written past their version counter
        self._copies: dict[Key, CachedForm] = {}

    def end_forward(self) -> None:
        """Forget the forms of a forward that is over: they belong to its graph alone."""
        self._leave_segments()
        self._cache = self._outer_cache = FormCache()
        for cached in (self._copies, self._uncacheable, self.bytes.exact):
            cached.clear()
        if not in_backward():  # else some would be computed once more
            for shared in HELD:
                shared.held = None
            HELD.clear()

    def enter_segment(self, segment: object) -> None:
        """Begin a segment of PyTorch's checkpointing, or return to the forward outside of all segments (None).

        A segment is recomputed alone, so it starts with an empty cache, also after a nested one.
        """
        self._leave_segments()
        if segment is not None:
            self.segment, self.bytes.paused = segment, True
            self.codec = getattr(self._forward_codec, "recomputed", self._forward_codec)
        if segment is not None or in_backward():
            self._cache = FormCache()

    def _leave_segments(self) -> None:
        self.segment = None  # which holds its inputs
        self.bytes.paused = False
        self.codec = self._forward_codec
        self._cache = self._outer_cache

    def code(self, x: Tensor, role: Role, prepare: Prepare | None = None) -> Saved:
        """Return ``x`` in the policy's codes.

        ``x`` itself is returned if it is a weight, has few values, is no dense float tensor, if PyTorch saves it
        anyway, or if it was passed to ``leave_exact``. ``prepare``: its result is coded, and decoded, in place of
        ``x``.
        """
        if x.dtype not in FLOATS or x.numel() <= MAX_EXACT_NUMEL or is_weight(x) or self._stays_exact(x):
            return self.exact(x)
        key, order, values = place(x)
        if role == "factor":
            self._register_slice(x)
        if key in self._cache.forms:
            return self._cache.forms[key].seen_as(order)
        values = values if prepare is None else prepare(values)
        encoded = self.codec.encode(values, order, role)
        if encoded is None:
            return self.exact(x)
        codes, decode = encoded
        coded = Coded(decode, x.dtype, order)
        self.bytes.add(values.numel() * x.element_size(), codes)
        return self._cached(key, x, codes, coded, order)

    def factor(self, x: Tensor, role: Role, needed: bool, exact: bool) -> Saved | None:
        """Return the form of one factor of a product; None unless the gradient of the other factor is ``needed``.

        The factor stays exact if ``exact``, and if no gradient flows through it (a mask, an adjacency, a table of
        rotations).
        """
        if not needed:
            return None
        return self.exact(x) if exact or not x.requires_grad else self.code(x, role)

    def exact(self, x: Tensor) -> Tensor:
        """Return ``x``, which is saved as it is."""
        if type(x) is not nn.Parameter and not is_weight(x):
            self.bytes.add_exact(x)
        return x

    def copy(self, x: Tensor) -> Saved:
        """Return ``x`` in memory of its own, for a tensor that PyTorch does not save: its owner may overwrite it before
        the backward. A bool takes a bit. Operations that read the same ``x`` share the copy."""
        key, order, values = place(x)
        if key not in self._copies or key[0] in self._uncacheable:
            if x.dtype == torch.bool:
                tensors, bitmask = self.bitmask(x)
                recomputed = Recomputed(Tensor.bool, ((1, bitmask),), order)
                form = SavedForm(tensors, Shared(recomputed))
            else:
                copy = values.clone(memory_format=torch.contiguous_format)
                self.bytes.add(x.nbytes, (copy,))
                form = SavedForm((copy,), Coded(lambda saved, dtype: saved[0], x.dtype, order))
            self._copies[key] = CachedForm(form, order, weak(x))
        return self._copies[key].seen_as(order)

    def leave_exact(self, x: Tensor) -> None:
        """Note that ``x`` is not to be coded."""
        self._cache.exact[x.untyped_storage()._cdata, version(x)] = weak(x)

    def never_cache(self, x: Tensor) -> None:
        """Note that the memory of ``x`` may be written past its version counter from now on: forget its forms, and
        cache no others."""
        self._uncacheable[x.untyped_storage()._cdata] = weak(x)
        for cache in (self._cache, self._outer_cache):
            cache.drop(x)

    def _stays_exact(self, x: Tensor) -> bool:
        producer = (x if x._base is None else x._base).grad_fn
        saved_anyway = producer is not None and producer.name() in _SAVE_THEIR_RESULT
        return saved_anyway or (x.untyped_storage()._cdata, version(x)) in self._cache.exact

    def bitmask(self, x: Tensor, low: float = 0.0, high: float = float("nan"), nan_is_open: bool = True) -> SavedForm:
        """Return whether each value of ``x`` (floating or bool) lies between the limits, in one bit, read as 0 or 1."""
        _, order, values = place(x)
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return self.packed_mask(pack_mask(values, low, high, nan_is_open), order, dtype)

    def packed_mask(self, bits: Tensor, order: MemoryOrder, dtype: torch.dtype) -> SavedForm:
        """Return the form of a mask that is packed already."""
        self.bytes.add(0, (bits,))
        return SavedForm((bits,), Bitmask(dtype, order))

    def find(self, x: Tensor) -> SavedForm | None:
        """Return the form that ``x`` has already."""
        self._register_slice(x)
        key, order, _ = place(x)
        cached = self._cache.forms.get(key)
        return None if cached is None else cached.seen_as(order)

    def find_recomputed(self, x: Tensor) -> SavedForm | None:
        """Return the form that ``x`` has already, if it is recomputed and has no codes of its own."""
        form = self.find(x)
        if form is None or not isinstance(form.decoder, Shared):
            return None
        return form if isinstance(form.decoder.source, Recomputed) else None

    def find_input(self, input_key: Any, x: Tensor) -> tuple[Codes | None, SavedForm | None]:
        """Return codes that a linear layer made of an input with this ``input_key``, else a form that ``x`` has
        already; None in place of the other. A slice of a recomputed tensor has none: ``find`` alone gives it one."""
        codes = self._cache.inputs.find(input_key)
        if codes is not None:
            return codes, None
        key, order, _ = place(x)
        cached = self._cache.forms.get(key)
        return None, None if cached is None else cached.seen_as(order)

    def put_input(self, input_key: Any, x: Tensor, operand: Operand, codes: Codes) -> None:
        """Cache the codes that a quantized linear layer made of the rows of ``x``."""
        self.bytes.add(x.nbytes, (codes.codes, codes.scales))
        key, order, _ = place(x)
        if key[0] in self._uncacheable:
            return
        self._cache.inputs.put(input_key, x, codes)
        fmt, axis, rows = operand.format, operand.axis, codes.shape
        if x.is_contiguous() and fmt is not None:  # so the codes are of memory order, and serve other operations too
            coded = Coded(lambda saved, dtype: unpack(saved[0], saved[1], fmt, rows, axis, dtype), x.dtype, order)
            self._cached(key, x, (codes.codes, codes.scales), coded, order)

    def register_recomputed(
        self, y: Tensor, sources: Sequence[Saved | None], fn: Callable[..., Tensor]
    ) -> SavedForm | None:
        """Cache that ``y`` is ``fn(*values of sources)``: an operation that would save it saves the sources instead.

        A weight among the sources is copied if it is small beside ``y``; else nothing is cached.
        """
        if y.numel() <= MAX_EXACT_NUMEL or NoneType in map(type, sources):
            return None
        key, order, values = place(y)
        if values.numel() != y.numel():  # an expanded tensor
            return None
        # whoever owns a weight may free, swap or change it before other layers' backward, as FSDP and DeepSpeed do
        weights = [x for x in sources if isinstance(x, Tensor) and may_be_freed(x)]
        if weights:
            if sum(map(_NBYTES, weights)) > _MAX_SHARE_OF_COPIES * y.nbytes:
                return None
            copies = {id(weight): weight.detach().clone() for weight in weights}
            self.bytes.add(0, tuple(copies.values()))
            sources = [copies.get(id(source), source) for source in sources]
        layout, tensors = split(sources)
        return self._cached(key, y, tensors, Recomputed(fn, layout, order), order)

    def _register_slice(self, x: Tensor) -> None:
        """Register a view of a recomputed tensor as recomputed from it, as one step's gate from the gates of all steps.

        Codes of the view would lose 1 - gate.
        """
        base = x._base
        if base is None or not base.is_contiguous() or place(x)[0] in self._cache.forms:
            return
        sizes, strides, start = x.shape, x.stride(), x.storage_offset() - base.storage_offset()
        form = self.find_recomputed(base)
        self.register_recomputed(
            x, (form,), lambda base: base.as_strided(sizes, strides, base.storage_offset() + start)
        )

    def code_repaired(
        self, y: Tensor, role: Role, repair: Callable[..., Tensor], *sources: Saved, prepare: Prepare | None = None
    ) -> Saved:
        """Return ``y`` in codes whose value is ``repair(decoded, *values of sources)``, a result that the operation
        could have had. ``prepare``: as for ``code``."""
        form = self.code(y, role, prepare)
        if isinstance(form, Tensor):
            return form
        repaired = self.register_recomputed(y, (form, *sources), repair)
        assert repaired is not None, "codes that are not repaired are no result of the operation"
        return repaired

    def _cached(
        self,
        key: Key,
        x: Tensor,
        tensors: tuple[Tensor, ...],
        source: Coded | Recomputed,
        order: MemoryOrder,
    ) -> SavedForm:
        form = SavedForm(tensors, Shared(source))
        if key[0] not in self._uncacheable:
            self._cache.forms[key] = CachedForm(form, order, weak(x))
        return form
