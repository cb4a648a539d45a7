"""Checks of the operations' inputs: an error of one line in place of one from deep inside."""

from typing import Any

import torch
from torch import Tensor

from dsq.kernels.backend import FLOATS

_function_transform = torch._C._functorch.peek_interpreter_stack


def check_tensors(x: Any, weight: Any, bias: Any) -> None:
    """Raise TypeError for what is no tensor, and RuntimeError under a transform of torch.func."""
    if not (isinstance(x, Tensor) and isinstance(weight, Tensor) and (bias is None or isinstance(bias, Tensor))):
        types = ", ".join(type(argument).__name__ for argument in (x, weight, bias))
        fx = "; torch.fx takes no converted layers: call dsq.unconvert(model) first" if "Proxy" in types else ""
        raise TypeError(f"x, weight and bias must be tensors, got {types}{fx}")
    if _function_transform() is not None:
        refuse_transforms()


def check_linear(x: Tensor, weight: Tensor, bias: Tensor | None, autocast: bool) -> None:
    """Raise TypeError for dtypes or layouts that no linear layer takes, ValueError for shapes and devices."""
    dtypes = FLOATS - {torch.float64} if autocast else {x.dtype}  # that may meet
    if x.dtype not in FLOATS or weight.dtype not in dtypes:
        raise TypeError(f"x and weight must share a floating dtype, got {x.dtype} and {weight.dtype}")
    if x.layout != torch.strided or weight.layout != torch.strided or x.is_nested:
        cure = "of a nested tensor give x.to_padded_tensor(0.0)" if x.is_nested else "of a sparse one x.to_dense()"
        raise TypeError(f"x and weight must be dense tensors, got ones of {x.layout} and {weight.layout}; {cure}")
    if x.dim() == 0 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x must be (..., K) and weight (N, K), got {tuple(x.shape)} and {tuple(weight.shape)}")
    if x.device != weight.device:
        raise ValueError(f"x and weight must be on one device, got {x.device} and {weight.device}")
    if bias is None:
        return
    if bias.dtype not in dtypes:
        raise TypeError(f"bias must have the dtype of x, {x.dtype}, got {bias.dtype}")
    if bias.shape != weight.shape[:1] or bias.device != x.device:
        raise ValueError(f"bias must be ({weight.shape[0]},) on {x.device}, got {tuple(bias.shape)} on {bias.device}")


def of_another_quantization(weight: Tensor) -> bool:
    """Return whether ``weight`` is a tensor made of others that is no DTensor, as torchao's int8."""
    return hasattr(weight, "__tensor_flatten__") and not hasattr(weight, "device_mesh")


def refuse_transforms() -> None:
    """Raise RuntimeError under a transform of torch.func. (While a compiler traces, its stack is never None.)"""
    if _function_transform() is not None and not torch.compiler.is_compiling():
        text = "dsq layers do not go with the transforms of torch.func (grad, vmap, jvp)"
        raise RuntimeError(f"{text}: call backward(), or dsq.unconvert(model) first")


def check_present(weight: Tensor, shape: torch.Size) -> None:
    """Raise RuntimeError where the memory of a saved weight was freed, or swapped for that of another ``shape``.

    FSDP frees storages, DeepSpeed sets ``.data`` to nothing: both bring a weight back for its own layer's backward.
    """
    got_bytes = weight.untyped_storage().nbytes()
    needed_bytes = weight.nbytes + weight.storage_offset() * weight.itemsize
    if not weight.is_contiguous() and weight.numel():  # an expanded weight has fewer bytes than its shape says
        steps = [(n - 1) * step for n, step in zip(weight.shape, weight.stride(), strict=True)]
        needed_bytes = (weight.storage_offset() + sum(steps) + 1) * weight.itemsize
    if weight.shape != shape or got_bytes < needed_bytes:
        got = f"{tuple(weight.shape)} in {got_bytes} bytes: it was freed since the forward, and not brought back"
        raise RuntimeError(f"a weight of {tuple(shape)} must be there for its backward, got {got}")
