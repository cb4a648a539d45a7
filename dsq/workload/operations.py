"""The entry of each operation: products by their sizes, all else as passes over its tensors.

Shape suffixes: B batch, M rows, K the contraction, N columns; T tokens, E experts; C channels, O out-channels; of
attention H heads, L queries, G groups of heads, S keys, D features, E features of a value.
"""

import math
from typing import Any

import torch
from torch import Tensor

from dsq.workload.recorder import Entry, Recorder, RecordOp

aten = torch.ops.aten


def _product(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """bias + a_BMK b_BKN, either of which may lack the batch axis, or a_BMK b_BKN alone. Of a parameter b each matrix
    multiplies rows of its own: those of one expert."""
    *added, a, b = args
    bias = added[0] if added and recorder.is_parameter(added[0]) else None
    batch, rows, width = a.shape if a.dim() == 3 else (1, *a.shape)
    name, weight = recorder.named(b, name)
    fields = {"x_grad": a.requires_grad, "w_grad": b.requires_grad}
    if weight is not None and batch > 1:
        fields["weights"] = batch if b.stride(0) else 1  # one matrix may be expanded
        batch, rows = 1, batch * rows
    recorder.add_gemm(name, (batch, rows, width, b.shape[-1]), weight, bias, **fields)


def _experts(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """x_TK b_EKN: each row by the matrix of one expert."""
    x, b = args[:2]
    name, weight = recorder.named(b, name)
    fields = {"weights": b.shape[0], "x_grad": x.requires_grad, "w_grad": b.requires_grad}
    recorder.add_gemm(name, (1, *x.shape, out.shape[-1]), weight, **fields)


def _convolution(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """x_BC..., w_OC...: a product of its patches (positions, channels * kernel), each group of channels by itself."""
    x, w, bias, groups = args[0], args[1], args[2], args[8]
    transposed, kernel = args[6], math.prod(w.shape[2:])
    rows = x.shape[0] * math.prod((x if transposed else out).shape[2:])
    inside, outputs = x.shape[1] // groups, out.shape[1] // groups
    width, outputs = (inside, outputs * kernel) if transposed else (inside * kernel, outputs)
    name, weight = recorder.named(w, name)
    recorder.add_gemm(
        name,
        (1, rows * groups, width, outputs),
        weight,
        bias if recorder.is_parameter(bias) and not transposed else None,
        weights=groups,
        x_values=x.numel(),
        x_grad=x.requires_grad,
        w_grad=w.requires_grad,
    )


def _fused_attention(recorder: Recorder, name: str, args: Any, out: Any) -> None:
    """q_BHLD, k_BGSD, v_BGSE: two products whose scores stay on chip and are made again in the backward. Where they are
    quantised it is dsq.ops.products.attention that runs, which stores the scores."""
    q, k, v = args[:3]
    batch, heads, length, depth = q.shape
    groups, keys = k.shape[1], k.shape[2]
    grads = {"x_grad": q.requires_grad}
    size = (batch * groups, length * (heads // groups))
    fused = not recorder.quantised_attention
    scores: Entry = {"w_grad": k.requires_grad} | ({"on_chip": "y", "recompute": 1} if fused else {})
    recorder.add_gemm(f"{name}.scores", (*size, depth, keys), **grads, **scores)
    for kind in () if fused else ("scale", "softmax"):
        recorder.add_pass(f"{name}.{kind}", kind, math.prod(size), keys, "attention")
    context: Entry = {"w_grad": v.requires_grad} | ({"on_chip": "x"} if fused else {})
    recorder.add_gemm(f"{name}.context", (*size, keys, v.shape[-1]), **grads, **context)


def _pass(kind: str, cls: str = "other") -> RecordOp:
    def record(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
        recorder.add_pass(name, kind, max(1, out.numel() // max(1, out.shape[-1])), out.shape[-1], cls)

    return record


def _norm(recorder: Recorder, name: str, args: Any, out: Any) -> None:
    x, shape = args[:2]
    affine = [p for p in args[2:4] if recorder.is_parameter(p)]
    owned = sum(p.numel() for p in affine if recorder.own(p))
    width, trained = math.prod(shape), not affine or any(p.requires_grad for p in affine)
    recorder.add_pass(name, "norm", x.numel() // width, width, parameters=owned, trained=trained)


def _embedding(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    table, ids = args[:2]
    owned = table.numel() if recorder.is_parameter(table) and recorder.own(table) else 0
    trained = bool(table.requires_grad)
    recorder.add_pass(name, "embedding", ids.numel(), table.shape[1], parameters=owned, trained=trained)


def _sum(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """x + f(x), both activations of one shape; a bias or a mask is no residual."""
    a, b = args[:2]
    if isinstance(b, Tensor) and a.shape == b.shape and a.dim() > 1 and b.requires_grad:
        _pass("residual")(recorder, name, args, out)


def _times(recorder: Recorder, name: str, args: Any, out: Tensor) -> None:
    """A gate, where both sides are activations; dropout's mask is none, and moves nothing."""
    a, b = args[:2]
    if isinstance(b, Tensor) and a.shape == b.shape and a.requires_grad and b.requires_grad:
        _pass("gate")(recorder, name, args, out)


#: what enters a call, by operator
OPERATIONS: dict[Any, RecordOp] = {
    **dict.fromkeys((aten.mm, aten.bmm, aten.addmm, aten.baddbmm), _product),
    aten._grouped_mm: _experts,
    aten.convolution: _convolution,
    **{
        getattr(aten, f"_scaled_dot_product_{kind}"): _fused_attention
        for kind in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
    },
    **dict.fromkeys((aten._softmax, aten._safe_softmax), _pass("softmax", "attention")),
    aten.masked_fill: _pass("scale", "attention"),
    aten._log_softmax: _pass("loss"),
    **dict.fromkeys((aten.native_layer_norm, aten._fused_rms_norm), _norm),
    aten.embedding: _embedding,
    aten.add: _sum,
    aten.mul: _times,
    **dict.fromkeys((aten.relu, aten.gelu, aten.silu, aten.tanh, aten.sigmoid, aten.leaky_relu), _pass("activation")),
}
