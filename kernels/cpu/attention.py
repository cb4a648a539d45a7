"""PyTorch's fused attention on the CPU by the compiled kernels (src/attention), for AVX-512 and for AVX2.

PyTorch's own attention calls MKL for each block of keys, and MKL uses 256-bit units on CPUs of other makers than Intel.
In bfloat16 PyTorch creates a oneDNN primitive for each small product. These kernels replace PyTorch's behind the same
operators, so callers, saved tensors and compiled graphs need no change. Results differ by the rounding of sums. PyTorch
serves other dtypes and fewer heads than threads, and in the operators masks and dropout.

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

from dsq.kernels.backend import AttentionOptions
from dsq.kernels.cpu.library import Library
from dsq.kernels.cpu.memory import addresses, scratch

_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_DTYPES = (torch.float32, torch.bfloat16)


@cache
def cpu_attention(library: Library) -> "CpuAttention | None":
    """Return the kernels of ``library``, always the same object; None if they do not run on this machine."""
    return CpuAttention(library) if library.usable(library.c.dsq_attention) else None


class CpuAttention:
    """Attention by ``library``. The methods forward and backward have the signatures of PyTorch's operators, after the
    dispatcher's keys, and call PyTorch's own for arguments that the kernels do not support."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._forward, self._backward = (
            torch.library.get_kernel(f"aten::{name}", "CPU") for name in (_FORWARD, f"{_FORWARD}_backward")
        )
        self._descriptor = lru_cache(maxsize=256)(self._new_descriptor)
        self._lock = Lock()
        self._open_contexts = 0  #: of serving(), in all threads
        self._operators: Any = None  #: the registrations, which last as long as this object

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Serve PyTorch's operators by these kernels inside the context, in all threads."""
        with self._lock:
            if self._operators is None:
                self._register()
            self._open_contexts += 1
        try:
            yield
        finally:
            with self._lock:
                self._open_contexts -= 1

    def _register(self) -> None:
        self._operators = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch warns that a kernel is replaced
            self._operators.impl(_FORWARD, self.forward, "CPU", with_keyset=True)
            self._operators.impl(f"{_FORWARD}_backward", self.backward, "CPU", with_keyset=True)

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
        """Return y (B, H, L, D) and the logarithm of each query's sum of exponentials (B, H, L)."""
        options = AttentionOptions(is_causal, scale, attn_mask, dropout_p)
        if not self._serves(options) or not _supported(q_BHLD, k_BHSD, v_BHSD, options):
            arguments = q_BHLD, k_BHSD, v_BHSD, dropout_p, is_causal
            return self._forward.call_boxed(keys, *arguments, attn_mask=attn_mask, scale=scale)
        batches, heads, rows, _ = q_BHLD.shape
        o_BHLD = torch.empty_like(q_BHLD)  # compilers rely on the strides of PyTorch's result
        lse_BHL = torch.empty(batches, rows, heads, dtype=torch.float32, device="cpu").transpose(1, 2)
        tensors = {"q": q_BHLD, "k": k_BHSD, "v": v_BHSD, "o": o_BHLD, "lse": lse_BHL}
        self._run(self._library.c.dsq_attention_forward, tensors, options)
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
        """Return the gradients of q, k and v."""
        options = AttentionOptions(is_causal, scale, attn_mask, dropout_p)
        gradients = self.gradients(dy_BHLD, q_BHLD, k_BHSD, v_BHSD, options) if self._serves(options) else None
        if gradients is None:
            arguments = dy_BHLD, q_BHLD, k_BHSD, v_BHSD, y_BHLD, lse_BHL, dropout_p, is_causal
            return self._backward.call_boxed(keys, *arguments, attn_mask=attn_mask, scale=scale)
        return gradients

    def _serves(self, options: AttentionOptions) -> bool:
        """Return whether these kernels serve PyTorch's operators now, for these options."""
        return self._open_contexts > 0 and options.mask is None and not options.dropout

    def gradients(
        self,
        dy_BHLD: Tensor,
        q_BHLD: Tensor,
        k_BHSD: Tensor,
        v_BHSD: Tensor,
        options: AttentionOptions,
        of_mask: bool = False,
    ) -> tuple[Tensor, ...] | None:
        """Return the gradients of q, k and v, and with ``of_mask`` of the mask; None if the kernels do not support the
        arguments. They need no result of a forward."""
        groups, k_BHSD, v_BHSD = _repeat_heads(q_BHLD, k_BHSD, v_BHSD)
        if not _supported(q_BHLD, k_BHSD, v_BHSD, options):
            return None
        if dy_BHLD.shape != q_BHLD.shape or dy_BHLD.dtype != q_BHLD.dtype:  # kernels read memory by these shapes
            got = f"{dy_BHLD.dtype} {tuple(dy_BHLD.shape)}"
            raise ValueError(f"the gradient of attention must be {q_BHLD.dtype} {tuple(q_BHLD.shape)}, got {got}")
        dq_BHLD, dk_BHSD, dv_BHSD = (_empty_heads_like(x) for x in (q_BHLD, k_BHSD, v_BHSD))
        dy_BHLD = dy_BHLD if dy_BHLD.stride(-1) == 1 else dy_BHLD.contiguous()
        tensors = {"q": q_BHLD, "k": k_BHSD, "v": v_BHSD, "d_o": dy_BHLD, "dq": dq_BHLD, "dk": dk_BHSD, "dv": dv_BHSD}
        if of_mask:
            tensors["d_mask"] = torch.empty((*q_BHLD.shape[:3], k_BHSD.shape[2]), dtype=torch.float32, device="cpu")
        self._run(self._library.c.dsq_attention_backward, tensors, options)
        if groups > 1:
            dk_BHSD, dv_BHSD = (x.unflatten(1, (-1, groups)).sum(2) for x in (dk_BHSD, dv_BHSD))
        if of_mask and options.mask is not None:
            d_mask = tensors["d_mask"].sum_to_size(options.mask.shape).to(options.mask.dtype)
            return dq_BHLD, dk_BHSD, dv_BHSD, d_mask
        return dq_BHLD, dk_BHSD, dv_BHSD

    def result(self, q_BHLD: Tensor, k_BHSD: Tensor, v_BHSD: Tensor, options: AttentionOptions) -> Tensor | None:
        """Return the result (B, H, L, D); None if the kernels do not support the arguments."""
        _, k_BHSD, v_BHSD = _repeat_heads(q_BHLD, k_BHSD, v_BHSD)
        if not _supported(q_BHLD, k_BHSD, v_BHSD, options):
            return None
        o_BHLD = _empty_heads_like(q_BHLD)
        tensors = {"q": q_BHLD, "k": k_BHSD, "v": v_BHSD, "o": o_BHLD}
        self._run(self._library.c.dsq_attention_forward, tensors, options)
        return o_BHLD

    def _run(self, run: Any, tensors: dict[str, Tensor], options: AttentionOptions) -> None:
        q, k = tensors["q"], tensors["k"]
        tensors |= _mask_and_noise((*q.shape[:3], k.shape[2]), options)
        strides = tuple((name, x.stride()[:3]) for name, x in tensors.items())
        scalars = options.causal, options.scale, 1 / (1 - options.dropout)
        desc, floats = self._descriptor(strides, q.shape, k.shape[2], q.dtype, *scalars)
        threads = torch.get_num_threads()
        memory = scratch(4 * floats * threads)
        pointers = zip(tensors, addresses(*tensors.values(), strided=True), strict=True)
        run(desc, self._library.new("AttentionTensors", dict(pointers)), memory.data_ptr(), threads)

    def _new_descriptor(
        self,
        strides: Any,
        shape: torch.Size,
        keys: int,
        dtype: torch.dtype,
        causal: bool,
        scale: float | None,
        kept_factor: float,
    ) -> tuple[Any, int]:
        """Return an AttentionDesc *, and the floats of scratch memory per thread."""
        batches, heads, queries, width = shape
        fields: dict[str, Any] = dict(strides)
        fields |= {"batches": batches, "heads": heads, "queries": queries, "keys": keys, "width": width}
        fields |= {"causal": causal, "dtype": self._library.dtypes()[dtype]}
        fields |= {"scale": 1 / math.sqrt(width) if scale is None else scale, "kept": kept_factor}
        desc = self._library.new("AttentionDesc", fields)
        return desc, self._library.c.dsq_attention_scratch(desc, "dq" in fields)


def _supported(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> bool:
    """Return whether the kernels support the arguments. The shift of the exponentials requires a scale above 0."""
    if not q.dim() == k.dim() == v.dim() == 4:
        return False
    dtypes_match = q.dtype == k.dtype == v.dtype and q.dtype in _DTYPES
    shapes_match = k.shape == v.shape and q.shape[::3] == k.shape[::3] and q.shape[1] == k.shape[1]
    rows_are_contiguous = q.stride(3) == k.stride(3) == v.stride(3) == 1
    heads_fill_threads = q.numel() * k.numel() > 0 and q.shape[:2].numel() >= torch.get_num_threads()
    options_fit = (options.scale is None or options.scale > 0) and 0 <= options.dropout < 1
    return dtypes_match and shapes_match and rows_are_contiguous and heads_fill_threads and options_fit


def _repeat_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[int, Tensor, Tensor]:
    """Return the number of q's heads per head of k and v, and k and v repeated to as many heads as q."""
    groups = q.shape[1] // k.shape[1] if q.dim() == k.dim() == 4 and k.numel() else 1
    return (groups, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)) if groups > 1 else (1, k, v)


def _mask_and_noise(shape: tuple[int, ...], options: AttentionOptions) -> dict[str, Tensor]:
    """Return the mask as numbers to add to the scores, which have this shape, and the noise; each only if given."""
    tensors = {}
    mask = options.mask
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -math.inf)
        tensors["mask"] = mask.detach().float().expand(*mask.shape[:-1], shape[-1]).contiguous().expand(shape)
    return tensors if options.noise is None else tensors | {"noise": options.noise()}


def _empty_heads_like(x_BHLD: Tensor) -> Tensor:
    """Return an uninitialized tensor of this shape, whose memory has the order (B, L, H, D)."""
    batches, heads, rows, width = x_BHLD.shape
    return torch.empty(batches, rows, heads, width, dtype=x_BHLD.dtype, device="cpu").transpose(1, 2)
