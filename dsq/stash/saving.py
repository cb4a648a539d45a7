"""Helpers of autograd functions whose tensors are saved as forms."""

from typing import Any

import torch
from torch import Tensor

from dsq.stash.memory import is_weight
from dsq.stash.saved_forms import PresentWeight, Saved, SavedForm, Shared, read, split


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
