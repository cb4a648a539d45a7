"""The stash of one forward: in what form each saved tensor is kept, and how the backward makes it again.

A Form is some tensors, which autograd saves, and a function that makes the value of them. There are four:

    exact     the tensor itself, as PyTorch keeps it
    coded     the codes of a policy's codec, over the values in the order they lie in memory
    bits      one bit a value: a mask
    derived   nothing of its own: made again from forms that other operations keep

A Stash codes a piece of memory once, whatever views of it are saved: it remembers what it made by storage, version and
span. The operations that are coded, and why, are in dsq/stash/table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol
from weakref import ref

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from dsq.kernels.backend import FLOATS, Operand
from dsq.kernels.dispatch import pack_mask, unpack_mask
from dsq.stash.memory_order import MemoryOrder, span
from dsq.stash.storages import storage_key, weak

FEW = 256  #: values up to which a tensor is kept exact
Make = Callable[[Sequence[Tensor]], Tensor]
Kind = Literal["matmul", "softmax", "gelu", "layernorm", "conv", "linear", "batchnorm", "other"]
What = Literal["linear", "product", "convolution", "softmax", "attention", "norm", "activation", "factor", "boundary"]

_compiling = torch.compiler.is_compiling


@dataclass(frozen=True)
class Kept:
    """A row's word on one tensor that an operation keeps."""

    what: What  #: it is: what dsq/stash/table/bits.py gives bits to
    kind: Kind  #: of operation: what Mesa's table 7 switches on alone
    axis: int = -1  #: along which Mesa's groups lie: heads (-3), channels


class Form(NamedTuple):
    """How a tensor is kept: what autograd saves, and what makes the tensor of it."""

    tensors: tuple[Tensor, ...]
    make: Make


#: (codes, dtype) -> the values, in memory order, contiguous
Decode = Callable[[Sequence[Tensor], torch.dtype], Tensor]


class Codec(Protocol):
    """What a policy is to the table: how values become few bits."""

    def encode(self, values: Tensor, order: MemoryOrder, kept: Kept) -> tuple[tuple[Tensor, ...], Decode] | None:
        """Codes of ``values``, which lie in ``order``; None keeps the tensor exact.

        An attribute ``recomputed`` is the codec for what a segment of PyTorch's checkpointing saves: it is made again.
        """
        ...


#: the operand of a layer, and the width of the rows that it read
_LinearCodes = tuple[Operand, int]


@dataclass(frozen=True, eq=False)
class _Made:
    """What was made of a piece of memory. Its codes are referred to weakly: a graph that dies frees them."""

    codes: tuple[Callable[[], Tensor | None], ...]
    source: StorageWeakRef  #: while it lives no other storage has the address that the key names
    make: Make
    linear: _LinearCodes | None  #: where a quantised linear layer made them

    def form(self) -> Form | None:
        """The form, while all of its codes live."""
        tensors = []
        for code in self.codes:
            tensor = code()
            if tensor is None:
                return None
            tensors.append(tensor)
        return Form(tuple(tensors), self.make)


class Stash:
    """The saved tensors of one forward of a model under a policy.

    raw_bytes, kept_bytes: of the memory that came to be saved, weights aside, and of what is kept for it. Under
    torch.compile nothing is remembered: a compiler finds by itself what is coded twice.
    """

    def __init__(self, codec: Codec, recomputing: bool = False) -> None:
        self.codec = self._of_forward = codec
        self.raw_bytes = 0
        self.kept_bytes = 0
        self.segment: object = None  #: the checkpoint in whose segment the forward is
        self._holding = recomputing
        self._made: dict[tuple[object, ...], _Made] = {}
        self._outside = self._made
        self._exact: dict[tuple[object, ...], StorageWeakRef] = {}

    def forget(self) -> None:
        """The forward is over: what it made is the graph's alone."""
        self._made = self._outside = {}
        self._exact = {}

    def enter_segment(self, segment: object) -> None:
        """Begin a segment of PyTorch's checkpointing, or return to what is outside of all (None).

        A segment saves the same tensors when it is recomputed, so it may know nothing of what was made before it. Its
        hooks take what autograd saves: codes are held here until the segment ends, so that they can be shared in it.
        """
        self.segment = segment
        self._holding = segment is not None
        self.codec = self._of_forward if segment is None else getattr(self._of_forward, "recomputed", self._of_forward)
        self._made = self._outside if segment is None else {}

    def code(self, x: Tensor, kept: Kept) -> Form:
        """The form of ``x`` in the policy's codes; exact where it is a weight, of few values, or no plain float."""
        if x.dtype not in FLOATS or x.numel() <= FEW or is_weight(x):
            return self.exact(x)
        if _compiling():
            return self._encode_traced(x, kept)
        order, values = MemoryOrder.of(x)
        key = (*storage_key(x), *span(values))
        found = self._find(key)
        if found is not None:
            return _seen_as(found, order)
        encoded = self.codec.encode(values, order, kept)
        if encoded is None:
            return self.exact(x)
        tensors, decode = encoded
        made = Form(tensors, _Decoded(decode, x.dtype))
        self._count(values.numel() * x.element_size(), _nbytes(tensors))
        self._put(key, x, made)
        return _seen_as(made, order)

    def _encode_traced(self, x: Tensor, kept: Kept) -> Form:
        shape, dtype = x.shape, x.dtype
        encoded = self.codec.encode(
            x.detach().contiguous(), MemoryOrder(tuple(shape), tuple(range(x.dim())), shape), kept
        )
        if encoded is None:
            return self.exact(x)
        tensors, decode = encoded
        return Form(tensors, lambda codes: decode(codes, dtype).view(shape))

    def exact(self, x: Tensor) -> Form:
        """``x`` as it is."""
        if not _compiling() and not is_weight(x):
            key = storage_key(x)
            if key not in self._exact:
                self._exact[key] = weak(x)
                self._count(x.nbytes, x.nbytes)
        return Form((x,), _first)

    def bits(self, x: Tensor, low: float = 0.0, high: float = float("nan"), nan_is_open: bool = True) -> Form:
        """Where ``x`` (floating or bool) lies between the limits, a bit a value; made again as 0 and 1 in its dtype."""
        shape, dtype = x.shape, x.dtype if x.is_floating_point() else torch.float32
        if _compiling():
            return Form(
                (_pack_bits(_between(x, low, high, nan_is_open)),), lambda bits: _unpack_bits(bits[0], shape, dtype)
            )
        order, values = MemoryOrder.of(x)
        return self.mask(pack_mask(values, low, high, nan_is_open), order, dtype)

    def mask(self, bits: Tensor, order: MemoryOrder, dtype: torch.dtype) -> Form:
        """A mask whose bits were made already."""
        self._count(0, bits.nbytes)
        return Form((bits,), lambda kept: order.restore(unpack_mask(kept[0], order.count, 0.0, 1.0, dtype)))

    def find(self, x: Tensor) -> Form | None:
        """The form that ``x`` has already."""
        if _compiling():
            return None
        order, values = MemoryOrder.of(x)
        found = self._find((*storage_key(x), *span(values)))
        return None if found is None else _seen_as(found, order)

    def derive(self, y: Tensor, sources: Sequence[Form | None], make: Callable[..., Tensor]) -> None:
        """Note that ``make(*values of sources)`` gives ``y`` again, as it is laid out: no one needs to keep it."""
        if _compiling() or None in sources or y.numel() <= FEW:
            return
        order, values = MemoryOrder.of(y)
        if values.numel() != y.numel():  # an expanded tensor
            return
        parts, tensors = _parts(sources)
        made = Form(tensors, _Derived(parts, make, order))
        self._put((*storage_key(y), *span(values)), y, made)

    def restored(self, y: Tensor, kept: Kept, restore: Callable[..., Tensor], *beside: Form) -> Form:
        """The form of ``y`` in codes, of which ``restore(rounded, *values beside)`` makes a state that the operation
        could have been in."""
        form = self.code(y, kept)
        if form.make is _first:
            return form
        if _compiling():
            return derived_form((form, *beside), restore)
        self.derive(y, (form, *beside), restore)
        return self.find(y) or form

    def put_linear(self, x: Tensor, operand: Operand, form: Form) -> None:
        """Note the codes that a quantised linear layer made of ``x``, row by row: ``form`` makes its values."""
        self._count(x.nbytes, _nbytes(form.tensors))
        if x.is_contiguous():  # else its rows do not lie in memory as others would look for them
            self._put((*storage_key(x), *span(x)), x, form, (operand, x.shape[-1]))

    def find_linear(self, x: Tensor, operand: Operand) -> tuple[Tensor, ...] | None:
        """The codes that a layer with the same operand made of the same memory in rows of the same width."""
        made = self._made.get((*storage_key(x), *span(x))) if x.is_contiguous() else None
        form = made.form() if made is not None and made.linear == (operand, x.shape[-1]) else None
        return None if form is None else form.tensors

    def _count(self, raw: int, kept: int) -> None:
        if self.segment is None:  # else it is kept for as long as the forward is in the segment
            self.raw_bytes += raw
            self.kept_bytes += kept

    def _find(self, key: tuple[object, ...]) -> Form | None:
        made = self._made.get(key)
        return None if made is None else made.form()

    def _put(self, key: tuple[object, ...], x: Tensor, form: Form, linear: _LinearCodes | None = None) -> None:
        hold: Callable[[Tensor], Callable[[], Tensor | None]] = _holding if self._holding else ref
        codes = tuple(map(hold, form.tensors))
        self._made[key] = _Made(codes, weak(x), form.make, linear)


def exact_form(x: Tensor) -> Form:
    """``x`` as it is, for a function that may run without a stash."""
    return Form((x,), _first)


def derived_form(sources: Sequence[Form], make: Callable[..., Tensor]) -> Form:
    """A form that ``make`` makes of the values of others."""
    parts, tensors = _parts(sources)
    return Form(tensors, lambda saved: make(*_values(parts, saved)))


def _parts(forms: Sequence[Form | None]) -> tuple[tuple[tuple[int, Any], ...], tuple[Tensor, ...]]:
    """How many tensors each form has and what makes its value, and all of the tensors."""
    parts: list[tuple[int, Any]] = []
    tensors: list[Tensor] = []
    for form in forms:
        if form is None:
            parts.append((0, None))
        else:
            parts.append((len(form.tensors), form.make))
            tensors.extend(form.tensors)
    return tuple(parts), tuple(tensors)


def _nbytes(tensors: Sequence[Tensor]) -> int:
    return sum([tensor.nbytes for tensor in tensors])


def _values(parts: Sequence[tuple[int, Make]], saved: Sequence[Tensor]) -> list[Tensor]:
    values, start = [], 0
    for count, make in parts:
        values.append(make(saved[start : start + count]))
        start += count
    return values


def keep(ctx: Any, *forms: Form | None) -> None:
    """Save forms (None: nothing) for the backward of an autograd function; called once, in its forward."""
    ctx.forms, tensors = _parts(forms)
    ctx.save_for_backward(*tensors)


def kept(ctx: Any) -> list[Any]:
    """The values of the forms, in order, None for None. RuntimeError under create_graph=True."""
    if not _compiling() and torch.is_grad_enabled():
        raise RuntimeError(
            "dsq.stash keeps this model's activations in a form that is differentiable once: create_graph=True is not "
            "supported"
        )
    saved, values, start = ctx.saved_tensors, [], 0
    for count, make in ctx.forms:
        values.append(None if make is None else make(saved[start : start + count]))
        start += count
    return values


def is_weight(x: Tensor) -> bool:
    """Whether ``x`` is a parameter, or a view of one."""
    if isinstance(x, nn.Parameter):
        return True
    return not _compiling() and x._is_view() and isinstance(x._base, nn.Parameter)


def _first(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].detach()


def _holding(tensor: Tensor) -> Callable[[], Tensor]:
    return lambda: tensor


@dataclass(eq=False, slots=True)
class _Decoded:
    decode: Decode
    dtype: torch.dtype

    def __call__(self, codes: Sequence[Tensor]) -> Tensor:
        return self.decode(codes, self.dtype)


@dataclass(eq=False, slots=True)
class _Derived:
    sources: tuple[tuple[int, Make], ...]
    make: Callable[..., Tensor]
    order: MemoryOrder

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """The values, in memory order."""
        return self.order.flat(self.make(*_values(self.sources, tensors)))


@dataclass(eq=False, slots=True)
class _Seen:
    make: Make
    order: MemoryOrder

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        return self.order.restore(self.make(tensors))


def _seen_as(form: Form, order: MemoryOrder) -> Form:
    """A form of values in memory order, as one consumer lays them out."""
    return Form(form.tensors, _Seen(form.make, order))


def _between(x: Tensor, low: float, high: float, nan_is_open: bool) -> Tensor:
    """kernels/reference/masks.py, in operations that a compiler fuses."""
    if x.dtype is torch.bool:
        return x
    inside = torch.ones_like(x, dtype=torch.bool)
    if low == low:
        inside = inside & (~(x <= low) if nan_is_open else x > low)
    if high == high:
        inside = inside & (~(x >= high) if nan_is_open else x < high)
    return inside


def _pack_bits(mask: Tensor) -> Tensor:
    flat = mask.reshape(-1).to(torch.int32)
    flat = torch.nn.functional.pad(flat, (0, -flat.numel() % 8)).view(-1, 8)
    return (flat << torch.arange(8, device=mask.device)).sum(-1).to(torch.uint8)


def _unpack_bits(bits: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    flat = (bits[:, None] >> torch.arange(8, device=bits.device)) & 1
    return flat.reshape(-1)[: shape.numel()].view(shape).to(dtype)
