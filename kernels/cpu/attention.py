"""PyTorch's fused attention on the CPU by the compiled kernels (src/attention.cpp).

PyTorch multiplies there by MKL, in 256-bit units on CPUs of other makers than Intel, and in bfloat16 by a primitive of
oneDNN that it makes for each small product. These kernels replace PyTorch's behind the same operators: callers, saved
tensors and compiled graphs need no change. Results differ by the rounding of sums. Masks, dropout, other dtypes and
fewer heads than threads go on to PyTorch's own.

Shape suffixes: B batch, H heads, L queries, S keys, D features of a head.
"""

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from dsq.kernels.cpu.library import Library
from dsq.kernels.cpu.memory import addresses, scratch

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_DTYPES = (torch.float32, torch.bfloat16)
_lock = Lock()
_inside = 0  # contexts of serving() that are open, in all threads


def is_faster(library: Library) -> bool:
    """Whether the kernels of ``library`` run here, and PyTorch's are slower."""
    return bool(library.c.dsq_attention_usable())


@contextmanager
def serving(library: Library) -> Iterator[None]:
    """PyTorch's operators by the kernels of ``library``, while inside, in all threads."""
    global _inside
    with _lock:
        _registered(library)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1


@cache
def _registered(library: Library) -> Any:
    """The registrations, which end with the result: so the cache keeps it."""
    kernels = AttentionKernels(library)
    operators = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a kernel is replaced
        operators.impl(_FORWARD, kernels.forward, "CPU", with_keyset=True)
        operators.impl(f"{_FORWARD}_backward", kernels.backward, "CPU", with_keyset=True)
    return operators


class AttentionKernels:
    """The operators with PyTorch's signatures, after the dispatcher's keys; those of ``library``, or PyTorch's."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._forward, self._backward = (
            torch.library.get_kernel(f"aten::{name}", "CPU") for name in (_FORWARD, f"{_FORWARD}_backward")
        )
        self._prepared = lru_cache(maxsize=256)(self._prepare)

    def forward(
        self,
        keys: torch._C.DispatchKeySet,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        """y (B, H, L, D) and the logarithm of each query's sum of exponentials (B, H, L)."""
        if not _serves(q_BHLD, k_BHSD, v_BHSD, dropout_p, attn_mask, scale):
            given = q_BHLD, k_BHSD, v_BHSD, dropout_p, is_causal
            return self._forward.call_boxed(keys, *given, attn_mask=attn_mask, scale=scale)
        batches, heads, rows, _ = q_BHLD.shape
        o_BHLD = torch.empty_like(q_BHLD)  # strides are PyTorch's: compilers rely on them
        lse_BHL = torch.empty(batches, rows, heads, dtype=torch.float32, device="cpu").transpose(1, 2)
        tensors = {"q": q_BHLD, "k": k_BHSD, "v": v_BHSD, "o": o_BHLD, "lse": lse_BHL}
        self._run(self._library.c.dsq_attention_forward, tensors, is_causal, scale)
        return o_BHLD, lse_BHL

    def backward(
        self,
        keys: torch._C.DispatchKeySet,
        dy_BHLD: Tensor,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        y_BHLD: Tensor,
        lse_BHL: Tensor,
        dropout_p: float,
        is_causal: bool,
        *,
        attn_mask: Tensor | None = None,
        scale: float | None = None,
    ) -> Any:
        """The gradients of q, k and v."""
        if not _serves(q_BHLD, k_BHSD, v_BHSD, dropout_p, attn_mask, scale):
            given = dy_BHLD, q_BHLD, k_BHSD, v_BHSD, y_BHLD, lse_BHL, dropout_p, is_causal
            return self._backward.call_boxed(keys, *given, attn_mask=attn_mask, scale=scale)
        _check("the gradient", dy_BHLD, q_BHLD.shape, q_BHLD.dtype)
        _check("the result", y_BHLD, q_BHLD.shape, q_BHLD.dtype)
        _check("its logsumexp", lse_BHL, q_BHLD.shape[:3], torch.float32)
        dq_BHLD, dk_BHSD, dv_BHSD = (_like_heads(x) for x in (q_BHLD, k_BHSD, v_BHSD))
        tensors = {"q": q_BHLD, "k": k_BHSD, "v": v_BHSD, "o": _rows(y_BHLD), "lse": lse_BHL}
        tensors |= {"d_o": _rows(dy_BHLD), "dq": dq_BHLD, "dk": dk_BHSD, "dv": dv_BHSD}
        self._run(self._library.c.dsq_attention_backward, tensors, is_causal, scale)
        return dq_BHLD, dk_BHSD, dv_BHSD

    def _run(self, run: Any, tensors: dict[str, Tensor], causal: bool, scale: float | None) -> None:
        q, k = tensors["q"], tensors["k"]
        strides = tuple((name, x.stride()[:3]) for name, x in tensors.items())
        desc, floats = self._prepared(strides, q.shape, k.shape[2], q.dtype, causal, scale)
        threads = torch.get_num_threads()
        memory = scratch(4 * floats * threads)
        found = zip(tensors, addresses(*tensors.values(), strided=True), strict=True)
        run(desc, self._library.new("AttentionTensors", dict(found)), memory.data_ptr(), threads)

    def _prepare(
        self, strides: Any, shape: torch.Size, keys: int, dtype: torch.dtype, causal: bool, scale: float | None
    ) -> tuple[Any, int]:
        """AttentionDesc *, and the floats of scratch memory that a thread takes."""
        batches, heads, queries, width = shape
        fields: dict[str, Any] = dict(strides)
        fields |= {"batches": batches, "heads": heads, "queries": queries, "keys": keys, "width": width}
        fields |= {"causal": causal, "dtype": self._library.dtypes()[dtype]}
        fields["scale"] = 1 / math.sqrt(width) if scale is None else scale
        desc = self._library.new("AttentionDesc", fields)
        return desc, self._library.c.dsq_attention_scratch(desc, "dq" in fields)


def _serves(q: Tensor, k: Tensor, v: Tensor, dropout_p: float, attn_mask: Tensor | None, scale: float | None) -> bool:
    """Whether the kernels take these; the shift of the exponentials asks for a scale above 0."""
    plain = attn_mask is None and dropout_p == 0 and (scale is None or scale > 0) and q.dtype in _DTYPES
    alike = q.dtype == k.dtype == v.dtype and k.shape == v.shape and q.shape[::3] == k.shape[::3]
    rows = q.shape[1] == k.shape[1] and q.stride(3) == k.stride(3) == v.stride(3) == 1
    some = q.numel() * k.numel() > 0 and q.shape[:2].numel() >= torch.get_num_threads()
    return _inside > 0 and plain and alike and rows and some


def _check(name: str, x: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Saved-tensor hooks may give back anything, and kernels read memory as shapes say."""
    if x.shape != shape or x.dtype != dtype:
        raise ValueError(f"{name} of attention must be {dtype} {tuple(shape)}, got {x.dtype} {tuple(x.shape)}")


def _like_heads(x_BHLD: Tensor) -> Tensor:
    """A new tensor of this shape, in memory (B, L, H, D)."""
    batches, heads, rows, width = x_BHLD.shape
    return torch.empty(batches, rows, heads, width, dtype=x_BHLD.dtype, device="cpu").transpose(1, 2)


def _rows(x: Tensor) -> Tensor:
    """``x`` with the values of a row side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()
