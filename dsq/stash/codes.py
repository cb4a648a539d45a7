"""The stash of one forward: in what form each saved tensor is kept, and how the backward makes it again.

A tensor is kept exact, as PyTorch keeps it, or as a Form: some tensors, which autograd saves, and a function that makes
the value of them. There are three:

    coded     the codes of a policy's codec, over the values in the order they lie in memory
    bits      one bit a value: a mask
    derived   nothing of its own: made again from forms that other operations keep

A Stash codes a piece of memory once, whatever views of it are saved: it remembers what it made by storage, version and
span. The operations that are coded, and why, are in dsq/stash/rules.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from math import prod
from types import NoneType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.formats import Format
from dsq.kernels.backend import FLOATS, Operand
from dsq.kernels.dispatch import pack, pack_mask, unpack, unpack_mask
from dsq.ops.linear_passes import check_present
from dsq.stash.memory import MemoryOrder, place, weak
from dsq.stash_bits import MAX_EXACT_NUMEL, Role

_MAX_SHARE_OF_COPIES = 1 / 2  #: bytes of copies of weights, as a share of those of what is made again of them
Make = Callable[[Sequence[Tensor]], Tensor]
Prepare = Callable[[Tensor], Tensor]

_compiling = torch.compiler.is_compiling
_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Form(NamedTuple):
    """How a tensor is kept: what autograd saves, and what makes the tensor of it."""

    tensors: tuple[Tensor, ...]
    make: Make


#: a tensor as it is kept: exact, or a form
Kept = Tensor | Form
#: (codes, dtype) -> the values, in memory order, contiguous, in new memory: a gradient may be written over them
Decode = Callable[[Sequence[Tensor], torch.dtype], Tensor]
Code = tuple[tuple[Tensor, ...], Decode]


class Codec(Protocol):
    """A policy as the table sees it: how values become few bits."""

    def encode(self, values: Tensor, order: MemoryOrder, role: Role) -> Code | None:
        """Return the codes of ``values``, which lie in ``order``; None keeps the tensor exact.

        An attribute ``recomputed`` is the codec for what a segment of PyTorch's checkpointing saves: it is made again.
        """
        ...


class _Exact:
    def encode(self, values: Tensor, order: MemoryOrder, role: Role) -> None:
        return None


EXACT = _Exact()  #: the codec that keeps every tensor exact


def in_blocks(values: Tensor, fmt: Format) -> Code:
    """Return the Code of values in blocks of neighbors, rounded to nearest."""
    sizes = (values.numel(),)
    codes = pack(values.reshape(-1), fmt, 0)
    return codes, lambda saved, dtype: unpack(saved[0], saved[1], fmt, sizes, 0, dtype)


class _Entry(NamedTuple):
    """The form that was made of a piece of memory."""

    form: Form
    order: MemoryOrder  #: in which the form lays the values out
    source: StorageWeakRef  #: while it lives no other storage has the address that the key names
    linear: tuple[Operand, int] | None  #: of a quantized linear layer's codes: its operand, and the width of its rows

    def seen_as(self, order: MemoryOrder) -> Form:
        """Return the form, as one consumer lays the values out."""
        (tensors, make), own = self.form, self.order
        if order is own:
            return self.form
        return Form(tensors, _Made(lambda saved: order.restore(own.flat(make(saved))), ((len(tensors), make),)))


def _is_small(x: Tensor) -> bool:
    """Return whether ``x`` has MAX_EXACT_NUMEL values; one whose size depends on data, as experts' tokens in a graph,
    has not."""
    if _compiling():
        from torch.fx.experimental.symbolic_shapes import guard_or_false

        return guard_or_false(x.numel() <= MAX_EXACT_NUMEL)
    return x.numel() <= MAX_EXACT_NUMEL


#: calls of a layer in one forward that go without a warning
MAX_CALLS = 100


class Stash:
    """The saved tensors of one forward of a model under a policy.

    raw_bytes, saved_bytes: of the memory that came to be saved, weights aside, and of what is kept for it. Under
    torch.compile nothing is remembered: a compiler finds by itself what is coded twice.
    """

    def __init__(self, codec: Codec) -> None:
        self.codec = self._of_forward = codec
        self.raw_bytes = 0
        self.saved_bytes = 0
        self.segment: Any = None  #: the checkpoint in whose segment the forward is
        self._made: dict[tuple[object, ...], _Entry] = {}
        self._left: dict[tuple[int, int], StorageWeakRef] = {}
        self._outside = self._made, self._left  #: of segments
        self._exact: dict[tuple[int, int], StorageWeakRef] = {}
        self._open: dict[int, StorageWeakRef] = {}
        self._calls: dict[int, int] = {}  #: of each weight's layer, by id
        self._copies: dict[tuple[object, ...], _Entry] = {}

    def forget(self) -> None:
        """Forget what the forward made, which is over: it is the graph's alone."""
        self._made, self._left = self._outside = {}, {}
        self._exact, self._open, self._calls, self._copies = {}, {}, {}, {}
        self.segment = None  # which holds its inputs

    def count_call(self, weight: Tensor) -> None:
        """Count a call of the layer of ``weight``, and warn of more than MAX_CALLS in this forward."""
        count = self._calls[id(weight)] = self._calls.get(id(weight), 0) + 1
        if count == MAX_CALLS + 1:
            text = f"a layer of {tuple(weight.shape)} was called over {MAX_CALLS} times in one forward: a loop until "
            text += "results agree, as an adaptive solver or a fixed point, may not end on rounded products; "
            warnings.warn(f"{text}leave its layers out by DSQConfig(exclude=...), or bound its steps", stacklevel=2)

    def enter_segment(self, segment: object) -> None:
        """Begin a segment of PyTorch's checkpointing, or return to what is outside of all (None).

        A segment saves the same tensors when it is recomputed, so it may know nothing of what was made before it, nor,
        behind a segment inside of it, of what it made before that one.
        """
        self.segment = segment
        self.codec = self._of_forward if segment is None else getattr(self._of_forward, "recomputed", self._of_forward)
        recomputed = segment is not None or torch._C._current_graph_task_id() != -1
        self._made, self._left = ({}, {}) if recomputed else self._outside

    def code(self, x: Tensor, role: Role, prepare: Prepare | None = None) -> Kept:
        """Return ``x`` in the policy's codes; ``x`` itself if it is a weight, of few values, no plain float, what
        PyTorch keeps anyway, or what ``leave_exact`` was told.

        Where ``prepare`` is given, what it makes of the values is coded, and made again in the place of ``x``.
        """
        if x.dtype not in FLOATS or _is_small(x) or is_weight(x) or self._stays_exact(x):
            return self.exact(x)
        key, order, values = place(x)
        if role == "factor":
            self._derive_part(x)
        if not _compiling() and key in self._made:
            return self._made[key].seen_as(order)
        values = values if prepare is None else prepare(values)
        encoded, dtype = self.codec.encode(values, order, role), x.dtype
        if encoded is None:
            return self.exact(x)
        codes, decode = encoded
        form = Form(codes, lambda saved: order.restore(decode(saved, dtype)))
        if _compiling():
            return form
        self._count(values.numel() * x.element_size(), codes)
        return self._put(key, x, form, order)

    def factor(self, x: Tensor, role: Role, wanted: bool, exact: bool) -> Kept | None:
        """Return how one factor of a product is kept if the other's gradient is ``wanted``: exact as told, and where no
        gradient flows through it (a mask, an adjacency, a table of rotations)."""
        if not wanted:
            return None
        return self.exact(x) if exact or not x.requires_grad else self.code(x, role)

    def exact(self, x: Tensor) -> Tensor:
        """Return ``x``, which is kept as it is."""
        if type(x) is not nn.Parameter and not _compiling() and not is_weight(x):
            key = x.untyped_storage()._cdata, x._version
            if key not in self._exact:
                self._exact[key] = weak(x)
                self._count(x.nbytes, (x,))
        return x

    def copy(self, x: Tensor) -> Kept:
        """Return ``x`` in memory of its own, for a tensor that PyTorch does not save: its owner may overwrite it before
        the backward. A bool takes a bit. Operations that read the same ``x`` share the copy."""
        if _compiling():  # which computes on copies of what is overwritten
            return x
        key, order, values = place(x)
        if key not in self._copies or key[0] in self._open:
            if x.dtype == torch.bool:
                bits, unpack = self.bits(x)
                form = Form(bits, _Made(lambda saved: unpack(saved).bool()))
            else:
                copy = values.clone(memory_format=torch.contiguous_format)
                self._count(x.nbytes, (copy,))
                form = Form((copy,), lambda saved: order.restore(saved[0]))
            self._copies[key] = _Entry(form, order, weak(x), None)
        return self._copies[key].seen_as(order)

    def leave_exact(self, x: Tensor) -> None:
        """Note that ``x`` is not to be coded."""
        if not _compiling():
            self._left[x.untyped_storage()._cdata, x._version] = weak(x)

    def leave_open(self, x: Tensor) -> None:
        """Note that the memory of ``x`` may be written past its version counter from now on: nothing is remembered of
        it, neither what was made of it before."""
        storage = x.untyped_storage()._cdata
        self._open[storage] = weak(x)
        for made in (self._made, self._outside[0]):
            for key in [key for key in made if key[0] == storage]:
                del made[key]

    def _stays_exact(self, x: Tensor) -> bool:
        if _compiling():
            return False
        maker = (x if x._base is None else x._base).grad_fn
        kept_anyway = maker is not None and maker.name() in _KEEP_THEIR_RESULT
        return kept_anyway or (x.untyped_storage()._cdata, x._version) in self._left

    def bits(self, x: Tensor, low: float = 0.0, high: float = float("nan"), nan_is_open: bool = True) -> Form:
        """Return where ``x`` (floating or bool) lies between the limits, a bit a value; made again as 0 and 1."""
        _, order, values = place(x)
        dtype = x.dtype if x.is_floating_point() else torch.float32
        return self.mask(pack_mask(values, low, high, nan_is_open), order, dtype)

    def mask(self, bits: Tensor, order: MemoryOrder, dtype: torch.dtype) -> Form:
        """Return the form of a mask whose bits were made already."""
        if not _compiling():
            self._count(0, (bits,))
        return Form((bits,), lambda kept: order.restore(unpack_mask(kept[0], prod(order.sizes), dtype)))

    def find(self, x: Tensor) -> Form | None:
        """Return the form that ``x`` has already."""
        self._derive_part(x)
        return self.find_linear(x, None)[1]

    def find_derived(self, x: Tensor) -> Form | None:
        """Return the form that ``x`` has already, if it has no codes of its own."""
        form = self.find(x)
        return form if form is not None and isinstance(form.make, _Made) and form.make.sources else None

    def find_linear(self, x: Tensor, operand: Operand | None) -> tuple[tuple[Tensor, ...] | None, Form | None]:
        """Return (codes, form) of ``x``: codes that a layer with the same operand made of the same rows, else a form
        that ``x`` has already."""
        if _compiling():
            return None, None
        key, order, _ = place(x)
        made = self._made.get(key)
        if made is None:
            return None, None
        if operand is not None and made.linear == (operand, x.shape[-1]) and x.is_contiguous():
            return made.form.tensors, None
        return None, made.seen_as(order)

    def put_linear(self, x: Tensor, operand: Operand, codes: tuple[Tensor, ...]) -> None:
        """Note the codes that a quantized linear layer made of the rows of ``x``."""
        if _compiling():  # sizes may be symbols there
            return
        self._count(x.nbytes, codes)
        fmt, axis, dtype = operand.format, operand.axis, x.dtype
        if x.is_contiguous() and fmt is not None:  # else no one looks for its rows in memory
            key, order, _ = place(x)
            rows = x.shape[:-1].numel(), x.shape[-1]
            form = Form(codes, lambda saved: order.restore(unpack(saved[0], saved[1], fmt, rows, axis, dtype)))
            self._put(key, x, form, order, (operand, x.shape[-1]))

    def derive(self, y: Tensor, sources: Sequence[Kept | None], make: Callable[..., Tensor]) -> Form | None:
        """Note that ``make(*values of sources)`` gives ``y`` again, as it is laid out: no one needs to keep it.

        Of a weight a copy is kept, if it is small beside ``y``; else ``y`` is not noted.
        """
        if _compiling() or y.numel() <= MAX_EXACT_NUMEL or NoneType in map(type, sources):
            return None
        key, order, values = place(y)
        if values.numel() != y.numel():  # an expanded tensor
            return None
        parts, tensors = _parts(sources)
        # whoever owns a weight may free, swap or change it before other layers' backward, as FSDP and DeepSpeed do
        weights = [it for it in tensors if _is_leaf_weight(it)]
        if weights:
            if sum(it.nbytes for it in weights) > _MAX_SHARE_OF_COPIES * y.nbytes:
                return None
            copies = {id(it): it.detach().clone() for it in weights}
            self._count(0, tuple(copies.values()))
            tensors = tuple(copies.get(id(it), it) for it in tensors)
        form = Form(tensors, lambda saved: order.laid_out(make(*_values(parts, saved))))
        return self._put(key, y, form, order, sources=parts)

    def _derive_part(self, x: Tensor) -> None:
        """Note that a part of what is made again of others, as one step's gate of the gates of all steps, is made of
        it: codes of its own would not say how near to 1 a gate is."""
        whole = x._base
        if _compiling() or whole is None or not whole.is_contiguous() or place(x)[0] in self._made:
            return
        layout, start = (x.shape, x.stride()), x.storage_offset() - whole.storage_offset()
        form = self.find_derived(whole)
        self.derive(x, (form,), lambda values: values.as_strided(*layout, values.storage_offset() + start))

    def restored(
        self, y: Tensor, role: Role, restore: Callable[..., Tensor], *beside: Kept, prepare: Prepare | None = None
    ) -> Kept:
        """Return ``y`` in codes, of which ``restore(rounded, *values beside)`` makes a state that the operation could
        have been in. ``prepare``: as for ``code``."""
        form = self.code(y, role, prepare)
        if isinstance(form, Tensor):
            return form
        if _compiling():
            parts, tensors = _parts((form, *beside))
            return Form(tensors, lambda saved: restore(*_values(parts, saved)))
        return self.derive(y, (form, *beside), restore) or form

    def _count(self, raw: int, kept: Sequence[Tensor]) -> None:
        if self.segment is None:  # else it is kept for as long as the forward is in the segment
            self.raw_bytes += raw
            for tensor in kept:
                self.saved_bytes += tensor.nbytes

    def _put(
        self, key: tuple[object, ...], x: Tensor, form: Form, order: MemoryOrder, linear: Any = None, sources: Any = ()
    ) -> Form:
        form = Form(form.tensors, _Made(form.make, sources))
        if key[0] not in self._open:
            self._made[key] = _Entry(form, order, weak(x), linear)
        return form


def keep(ctx: Any, *forms: Kept | None) -> None:
    """Save forms (None: nothing) for the backward of an autograd function; called once, in its forward."""
    ctx.forms, tensors = _parts([_checked(form) for form in forms])
    for _, make in ctx.forms:
        if isinstance(make, _Made):
            make.note_use()
    ctx.save_for_backward(*tensors)


def kept(ctx: Any) -> list[Any]:
    """Return the values of the forms, in order, None for None. RuntimeError under create_graph=True."""
    if torch.is_grad_enabled():
        refuse_create_graph()
    return _values(ctx.forms, ctx.saved_tensors)


def spare(ctx: Any, dy: Tensor, *values: Tensor) -> list[Tensor | None]:
    """Return those of ``values``, which ``kept(ctx)`` gave, that were unpacked for this backward of ``dy`` alone: it
    may write a gradient over them. None for the others, and for expanded ones, which have no place for each value."""
    plain = not _compiling() and not torch._C._functorch.is_legacy_batchedtensor(dy)  # vmap knows nothing that writes
    fresh = [plain and isinstance(make, _Made) and make.fresh for _, make in ctx.forms]
    return [x if own and 0 not in x.stride() else None for x, own in zip(values, fresh, strict=True)]


def refuse_create_graph() -> None:
    """Raise RuntimeError under create_graph=True: a second derivative of rounded or sampled values is wrong."""
    if torch.is_grad_enabled() and not _compiling():
        text = "activations in a packed stash are differentiable once: create_graph=True is not supported"
        raise RuntimeError(f"{text}; take the policies away (dsq.unconvert(model), controller.remove())")


def is_weight(x: Tensor) -> bool:
    """Return whether ``x`` is a parameter, or a view of one."""
    if isinstance(x, nn.Parameter):
        return True
    return not _compiling() and x._is_view() and isinstance(x._base, nn.Parameter)


def _is_leaf_weight(x: Tensor) -> bool:
    """Return whether ``x`` is a weight, or a view of one; torch.func.functional_call's are no parameters."""
    base = x if x._base is None else x._base
    return isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad)


def _checked(form: Kept | None) -> Kept | None:
    """Return the form of a weight that is saved as it is, and must be there in the backward."""
    if _compiling() or not isinstance(form, Tensor) or not is_weight(form):
        return form
    return Form((form,), partial(_present, shape=form.shape))


def _present(saved: Sequence[Tensor], shape: torch.Size) -> Tensor:
    check_present(saved[0], shape)
    return saved[0]


#: operations without a row that keep their result: codes of it would come on top, and an exponential, whose values are
#: of very different sizes, would lose most of them
_KEEP_THEIR_RESULT = {
    f"{name}Backward0" for name in ("Exp", "Exp2", "Sqrt", "Rsqrt", "Reciprocal", "Cumprod", "Logcumsumexp")
}


def _parts(forms: Sequence[Kept | None]) -> tuple[tuple[tuple[int, Make | None], ...], tuple[Tensor, ...]]:
    """Return how many tensors each form has and what makes its value (None: it is the tensor), and all tensors."""
    parts: list[tuple[int, Make | None]] = []
    tensors: list[Tensor] = []
    for form in forms:
        own = form.tensors if isinstance(form, Form) else () if form is None else (form,)
        parts.append((len(own), form.make if isinstance(form, Form) else None))
        tensors.extend(own)
    return tuple(parts), tuple(tensors)


def _values(parts: Sequence[tuple[int, Make | None]], saved: Sequence[Tensor]) -> list[Any]:
    values: list[Any] = []
    start = 0
    for count, make in parts:
        if make is not None:
            values.append(make(saved[start : start + count]))
        else:
            values.append(saved[start] if count else None)
        start += count
    return values


#: bytes of an unpacked value above which it is unpacked again for each operation that kept it
_HELD = 1 << 22


class _Made:
    """Makes a value that several operations may keep: in a backward once, and held until the last of them had it. One
    that is large and only has to be unpacked is not held: its memory is the peak's."""

    __slots__ = ("fresh", "run", "sources", "uses", "value")

    def __init__(self, run: Make, sources: Sequence[tuple[int, Make | None]] = ()) -> None:
        self.run = run
        self.sources = sources  #: of the values that this one is made of: how many tensors, and what makes the value
        self.uses = 0  #: operations that are to ask for the value, and values that are to be made of it
        self.value: Tensor | None = None
        self.fresh = False  #: the last value was made for the one who asked

    def note_use(self) -> None:
        """Note that an operation, or a value that one keeps, will ask for this one."""
        self.uses += 1
        if self.uses == 1:
            for _, source in self.sources:
                if isinstance(source, _Made):
                    source.note_use()

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        held = self.value
        value = self.run(tensors) if held is None else held
        self.uses -= 1
        # a graph that is kept may be read otherwise
        dropped = self.uses <= 0 or _keep_graph() or (not self.sources and value.nbytes > _HELD)
        self.value = None if dropped else value
        self.fresh = held is None and dropped and not self.sources
        return value
