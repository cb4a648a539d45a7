"""The forms in which a tensor is saved for the backward.

A tensor is saved exact, as PyTorch saves it, or as a SavedForm: the tensors that autograd saves in its place, and a
decoder that computes its value from them. The decoders hold no tensors themselves:

    PresentWeight the weight itself, which must still be there
    Coded         codes of a policy's codec, over the values in the order they lie in memory
    Bitmask       one bit a value
    Recomputed    a function of the values of other forms
    Shared        Coded or Recomputed, for several operations that read the value
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from dsq.formats import Format
from dsq.kernels.dispatch import pack, unpack, unpack_mask
from dsq.ops.checks import check_present
from dsq.stash.memory import MemoryOrder, is_weight
from dsq.stash_bits import Role

#: (codes, dtype) -> the values, in memory order, contiguous, in new memory: a gradient may be written over them
Decode = Callable[[Sequence[Tensor], torch.dtype], Tensor]
Encoded = tuple[tuple[Tensor, ...], Decode]

#: bytes of a decoded value above which each operation that reads it decodes it again
_MAX_SHARED_BYTES = 1 << 22
_keep_graph = torch._C._autograd._get_current_graph_task_keep_graph


class Codec(Protocol):
    """The part of a policy that turns values into few bits."""

    def encode(self, values: Tensor, order: MemoryOrder, role: Role) -> Encoded | None:
        """Return the codes of ``values``, which lie in ``order``, and their decoder; None saves the tensor exact.

        A codec may have an attribute ``recomputed``, the codec of segments that PyTorch's checkpointing recomputes.
        """
        ...


class _NoCodec:
    def encode(self, values: Tensor, order: MemoryOrder, role: Role) -> None:
        return None


NO_CODEC = _NoCodec()  #: the codec that saves every tensor exact


def encode_blocks(values: Tensor, fmt: Format) -> Encoded:
    """Return ``values`` in blocks of neighbors, rounded to nearest."""
    sizes = (values.numel(),)
    codes = pack(values.reshape(-1), fmt, 0)
    return codes, lambda saved, dtype: unpack(saved[0], saved[1], fmt, sizes, 0, dtype)


class PresentWeight(NamedTuple):
    """A weight saved as it is. Reading it raises RuntimeError if its memory was freed since the forward."""

    shape: torch.Size

    def value(self, saved: Sequence[Tensor]) -> Tensor:
        check_present(saved[0], self.shape)
        return saved[0]


class Coded(NamedTuple):
    """A tensor in codes."""

    decode: Decode
    dtype: torch.dtype
    order: MemoryOrder  #: of the values in memory

    def value(self, saved: Sequence[Tensor]) -> Tensor:
        return self.order.restore(self.decode(saved, self.dtype))


class Bitmask(NamedTuple):
    """A tensor of zeros and ones, one bit a value."""

    dtype: torch.dtype
    order: MemoryOrder

    def value(self, saved: Sequence[Tensor]) -> Tensor:
        return self.order.restore(unpack_mask(saved[0], prod(self.order.sizes), self.dtype))


class Recomputed(NamedTuple):
    """A tensor that is a function of the values of other forms."""

    fn: Callable[..., Tensor]
    sources: "FormLayout"
    order: MemoryOrder | None  #: in which the result is laid out; None: as ``fn`` lays it out

    def value(self, saved: Sequence[Tensor]) -> Tensor:
        result = self.fn(*read(self.sources, saved)[0])
        return result if self.order is None else self.order.laid_out(result)


#: those that hold a value for a reader that may get no gradient, and never come: released at the next forward's end
HELD: list["Shared"] = []


class Shared:
    """A value that several operations may read: computed once in a backward, and held until the last of them read it.

    As an example, GELU's x is saved in codes and read by GELU's backward and, to recompute GELU's result, by the next
    layer's: ``consumers_left`` goes 2, 1, 0. The first reader decodes x and leaves it in ``held``; the second takes it
    from there and clears it. A large value that is only decoded is not held, as it would raise the peak of memory.
    """

    __slots__ = ("consumers_left", "held", "source")

    def __init__(self, source: Coded | Recomputed) -> None:
        self.source = source
        self.consumers_left = 0  #: operations, and values recomputed from this one, that are still to read it
        self.held: Tensor | None = None

    def add_consumer(self) -> None:
        self.consumers_left += 1
        if self.consumers_left == 1 and type(self.source) is Recomputed:
            for _, decoder in self.source.sources:
                if type(decoder) is Shared:
                    decoder.add_consumer()

    def read(self, saved: Sequence[Tensor]) -> tuple[Tensor, bool]:
        """Return the value, and whether it was decoded for this reader alone, which may then overwrite it."""
        held = self.held
        value = self.source.value(saved) if held is None else held
        self.consumers_left -= 1
        coded = type(self.source) is Coded
        last = self.consumers_left <= 0
        retained = _keep_graph()  # such a graph may be read in another order
        large = coded and value.nbytes > _MAX_SHARED_BYTES  # held, it would raise the peak of memory
        self.held = None if last or retained or large else value
        if held is None and self.held is not None:
            HELD.append(self)
        return value, coded and held is None and self.held is None


Decoder = PresentWeight | Coded | Bitmask | Recomputed | Shared
#: of several forms: how many tensors each has, and its decoder, None for one tensor as it is, or for no tensor
FormLayout = tuple[tuple[int, Decoder | None], ...]


class SavedForm(NamedTuple):
    """A tensor as it is saved."""

    tensors: tuple[Tensor, ...]  #: those that autograd saves
    decoder: Decoder


#: a tensor that is saved exact, or a form
Saved = Tensor | SavedForm


def split(forms: Sequence[Saved | None]) -> tuple[FormLayout, tuple[Tensor, ...]]:
    """Return the layout of several forms, and all their tensors in a row."""
    layout: list[tuple[int, Decoder | None]] = []
    tensors: list[Tensor] = []
    for form in forms:
        if isinstance(form, SavedForm):
            layout.append((len(form.tensors), form.decoder))
            tensors.extend(form.tensors)
        elif form is None:
            layout.append((0, None))
        else:
            layout.append((1, None))
            tensors.append(form)
    return tuple(layout), tuple(tensors)


def read(layout: FormLayout, saved: Sequence[Tensor]) -> tuple[list[Any], list[bool]]:
    """Return the values of several forms, None for None, and which of them the reader may overwrite."""
    values: list[Any] = []
    unshared: list[bool] = []
    start = 0
    for count, decoder in layout:
        may_overwrite = False
        if decoder is None:
            value = saved[start] if count else None
        elif type(decoder) is Shared:
            value, may_overwrite = decoder.read(saved[start : start + count])
        else:
            value = decoder.value(saved[start : start + count])  # type: ignore[union-attr]
        values.append(value)
        unshared.append(may_overwrite)
        start += count
    return values, unshared


# ---- helpers of autograd functions whose tensors are saved as forms


def save(ctx: Any, *forms: Saved | None) -> None:
    """Save ``forms`` for the backward of an autograd function; None saves nothing. Call it once, in the forward."""
    ctx.layout, tensors = split([None if form is None else _checked(form) for form in forms])
    ctx.save_for_backward(*tensors)


def _checked(form: Saved) -> Saved:
    """Return ``form``, of which one more operation reads the value; a weight in the form that is checked when read."""
    if isinstance(form, SavedForm):
        if type(form.decoder) is Shared:
            form.decoder.add_consumer()
        return form
    if type(form) is Tensor and form._base is None:  # quicker to ask than is_weight
        return form
    return SavedForm((form,), PresentWeight(form.shape)) if is_weight(form) else form


def saved(ctx: Any) -> list[Any]:
    """Return the values of the forms, in order, None for None. Raise RuntimeError under create_graph=True."""
    if torch.is_grad_enabled():
        refuse_create_graph()
    values, ctx.unshared = read(ctx.layout, ctx.saved_tensors)
    return values


def reusable_buffers(ctx: Any, dy: Tensor, *values: Tensor) -> list[Tensor | None]:
    """Return those of ``values``, from ``saved(ctx)``, that this backward of ``dy`` may write a gradient over.

    None stands for those that other operations read, and for expanded ones, which have no place for each value.
    """
    # vmap, and the mode of allow_mutation_on_saved_tensors, have no rule for functions that write
    if torch._C._functorch.is_legacy_batchedtensor(dy) or torch._C._len_torch_dispatch_stack() > 0:
        return [None] * len(values)
    return [
        x if may_overwrite and 0 not in x.stride() else None
        for x, may_overwrite in zip(values, ctx.unshared, strict=True)
    ]


def refuse_create_graph() -> None:
    """Raise RuntimeError under create_graph=True: a second derivative of rounded or sampled values is wrong."""
    if torch.is_grad_enabled():
        text = "activations in a packed stash are differentiable once: create_graph=True is not supported"
        raise RuntimeError(f"{text}; take the policies away (dsq.unconvert(model), controller.remove())")
