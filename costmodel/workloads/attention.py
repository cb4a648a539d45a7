"""The operations of attention: its projections, copies and two batched products with a materialised softmax between
(see Workload.fusing_attention for the fused kernel)."""

from typing import Any

from costmodel.model.operations import ENCODER_OUT, Gemm, Operation, Pointwise
from costmodel.workloads.shapes import Latent, Stack, Transformer


def added_to_scores(stack: Stack, model: Transformer, length: int) -> list[Operation]:
    """What is made once for the scores of all layers: a mask of each window, T5's zeros for cross-attention."""
    ops: list[Operation] = [
        Pointwise(f"{stack.name}.mask{window or ''}", "mask", model.sequences * length, length, cls="attention")
        for window in sorted(set(stack.windows or (0,)))
        if stack.causal or window
    ]
    if stack.position_bias and stack.cross:
        rows = stack.heads * length
        ops.append(Pointwise(f"{stack.name}.cross_bias", "zero bias", rows, model.source_length, cls="attention"))
    return ops


def attention(
    prefix: str,
    stack: Stack,
    sequences: int,
    query_length: int,
    key_length: int,
    key_input: str,
    key_width: int,
    window: int = 0,
) -> list[Operation]:
    heads, kv_heads, crosses = stack.heads, stack.kv_heads or stack.heads, key_input == ENCODER_OUT
    head_dim = stack.head_dim or stack.d // heads
    value_dim = head_dim
    queries, keys = sequences * query_length, sequences * key_length
    query_input = f"{prefix}.x"
    # grouped-query attention: the heads that share keys are rows of one product
    batch, rows = sequences * kv_heads, query_length * (heads // kv_heads)

    def linear(name: str, rows: int, width: int, outputs: int, source: str, bias: bool) -> Gemm:
        own: dict[str, Any] = {"bias": bias, "quantised": stack.converted, "transposed": stack.transposed}
        return Gemm(f"{prefix}.{name}", rows, width, outputs, input=source, **own)

    pairs = heads // kv_heads * _pairs(query_length, key_length, stack.causal, window)

    def product(name: str, width: int, outputs: int, source: str = "") -> Gemm:
        size = rows, width, outputs, batch
        own: dict[str, Any] = {"weight": False, "quantised": False, "pairs": pairs, "input": source}
        own |= {"fused_once": crosses and bool(stack.position_bias)}
        return Gemm(f"{prefix}.{name}", *size, "attention", **own)

    ops: list[Operation] = []
    if stack.latent:
        head_dim, value_dim = stack.latent.plain + stack.latent.rotary, stack.latent.value
        ops += _latent_projections(prefix, stack, stack.latent, queries)
    else:
        bias = stack.qkv_bias
        fused = linear("qkv_proj", queries, stack.d, (heads + 2 * kv_heads) * head_dim, query_input, bias)
        ops += (
            [fused]
            if stack.fused_qkv
            else [
                linear("q_proj", queries, stack.d, heads * head_dim, query_input, bias),
                linear("k_proj", keys, key_width, kv_heads * head_dim, key_input, bias and stack.key_bias),
                linear("v_proj", keys, key_width, kv_heads * head_dim, key_input, bias),
            ]
        )
    for name, tokens, count in (("q_norm", queries, heads), ("k_norm", keys, kv_heads)):
        if stack.qk_norm:
            rows_, width = (tokens * count, head_dim) if stack.qk_norm == "head" else (tokens, count * head_dim)
            ops.append(Pointwise(f"{prefix}.{name}", "rms", rows_, width, parameters=width))
    turned = stack.latent.rotary if stack.latent else round(stack.rotary * head_dim)
    for name, tokens, count in (("q_rotary", queries, heads), ("k_rotary", keys, 1 if stack.latent else kv_heads)):
        if turned:
            ops.append(Pointwise(f"{prefix}.{name}", "rotary", tokens * count, turned))
    if stack.heads_copied and stack.fused_qkv:
        ops.append(Pointwise(f"{prefix}.qkv_split", "split", queries, (heads + 2 * kv_heads) * head_dim))
    copies = {  # keys, which are turned over, and values for every head, where heads share them
        name: [Pointwise(f"{prefix}.{name}_heads", kind, tokens * heads, width, cls="attention")]
        for name, kind, tokens, width in (
            ("q", "heads", queries, head_dim),
            ("k", "transposed", keys, head_dim),
            ("v", "heads", keys, value_dim),
            ("context", "heads", queries, value_dim),
        )
        if stack.heads_copied
    }
    scores = (batch * rows, key_length, "attention")
    learned = stack.position_bias and not crosses
    square = query_length * key_length
    added: dict[str, Any] = {"mask": sequences * square if stack.causal or window else 0}
    added |= {"bias": heads * square if stack.position_bias else 0}
    context = f"{prefix}.context" + (" (copy)" if stack.context_copied else "")
    dropout = [Pointwise(f"{prefix}.dropout", "dropout", *scores)]
    dropout = dropout if stack.attention_dropout else []
    ops += [
        *(copy for name in ("q", "k", "v") for copy in copies.get(name, [])),
        product("scores", head_dim, key_length),
        Pointwise(f"{prefix}.scale", "bias" if learned else "scale", *scores, **added),
        Pointwise(f"{prefix}.softmax", "softmax", *scores),
        *dropout,
        product("context", key_length, value_dim, "" if dropout else f"{prefix}.softmax"),
        *copies.get("context", []),
        linear("out_proj", queries, heads * value_dim, stack.d, context, stack.out_bias),
    ]
    return ops


def _pairs(queries: int, keys: int, causal: bool, window: int) -> int:
    """Pairs of a query and a key that it sees, of one head; 0: all of them."""
    if not causal and not window:
        return 0
    seen = min(window or keys, keys)
    causal_pairs = seen * (seen + 1) // 2 + (queries - seen) * seen
    return causal_pairs if causal else 2 * causal_pairs - queries  # the same to the other side; itself once


def _latent_projections(prefix: str, stack: Stack, latent: Latent, tokens: int) -> list[Operation]:
    ops: list[Operation] = []

    def linear(name: str, width: int, outputs: int, source: str, bias: bool = False) -> None:
        ops.append(Gemm(f"{prefix}.{name}", tokens, width, outputs, input=source, bias=bias, quantised=stack.converted))

    def narrowed(name: str, rank: int, more: int) -> str:
        linear(f"{name}_a_proj", stack.d, rank + more, f"{prefix}.x", stack.qkv_bias)
        ops.append(Pointwise(f"{prefix}.{name}_a_norm", "rms", tokens, rank, parameters=rank))
        return f"{prefix}.{name}_a_norm"

    source = narrowed("q", latent.query_rank, 0) if latent.query_rank else f"{prefix}.x"
    linear("q_b_proj", latent.query_rank or stack.d, stack.heads * (latent.plain + latent.rotary), source)
    source = narrowed("kv", latent.key_rank, latent.rotary)
    linear("kv_b_proj", latent.key_rank, stack.heads * (latent.plain + latent.value), source)
    return ops
