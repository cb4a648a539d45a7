"""The operations of attention: its projections, copies and two batched products with a materialised softmax between
(see Workload.fusing_attention for the fused kernel)."""

from dataclasses import dataclass
from typing import Any

from costmodel.model.operations import ENCODER_OUT, Gemm, Operation, Pointwise
from costmodel.workloads.shapes import Latent, Stack, Transformer

#: norms of queries and of keys: passes over heads, of which tensor parallelism gives each device its own
HEAD_NORMS = ("q_norm", "k_norm")


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


@dataclass(frozen=True)
class _Attention:
    """One attention of a layer, with the sizes that its operations share."""

    prefix: str
    stack: Stack
    sequences: int
    query_length: int
    key_length: int
    key_input: str  #: name of the tensor that keys and values are projected from
    key_width: int
    window: int  #: keys that a query sees; 0: all

    @property
    def crosses(self) -> bool:
        return self.key_input == ENCODER_OUT

    @property
    def query_tokens(self) -> int:
        return self.sequences * self.query_length

    @property
    def key_tokens(self) -> int:
        return self.sequences * self.key_length

    @property
    def heads(self) -> int:
        return self.stack.heads

    @property
    def kv_heads(self) -> int:
        return self.stack.kv_heads or self.stack.heads

    @property
    def head_dim(self) -> int:
        """Width of a query's head, and of a key's."""
        latent = self.stack.latent
        return latent.plain + latent.rotary if latent else self.stack.head_dim or self.stack.d // self.stack.heads

    @property
    def value_dim(self) -> int:
        return self.stack.latent.value if self.stack.latent else self.head_dim

    @property
    def qkv_width(self) -> int:
        """Outputs of the layer that makes queries, keys and values at once."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    def linear(self, name: str, tokens: int, width: int, outputs: int, source: str, bias: bool) -> Gemm:
        own: dict[str, Any] = {"quantised": self.stack.converted, "transposed": self.stack.transposed}
        return Gemm(f"{self.prefix}.{name}", tokens, width, outputs, input=source, bias=bias, **own)

    def pointwise(self, name: str, kind: str, rows: int, width: int, **fields: Any) -> Pointwise:
        return Pointwise(f"{self.prefix}.{name}", kind, rows, width, **fields)


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
    """The operations of one attention, in order; ``key_input`` ENCODER_OUT: of cross-attention."""
    own = _Attention(prefix, stack, sequences, query_length, key_length, key_input, key_width, window)
    projections = _latent_projections(own, stack.latent) if stack.latent else _projections(own)
    context = f"{prefix}.context" + (" (copy)" if stack.context_copied else "")
    return [
        *projections,
        *_query_key_norms(own),
        *_rotary_positions(own),
        *_copies_for_products(own),
        *_products(own),
        *_head_copy(own, "context", "heads", own.query_tokens, own.value_dim),
        own.linear("out_proj", own.query_tokens, own.heads * own.value_dim, stack.d, context, stack.out_bias),
    ]


def _projections(own: _Attention) -> list[Operation]:
    stack, bias, x = own.stack, own.stack.qkv_bias, f"{own.prefix}.x"
    if stack.fused_qkv:
        return [own.linear("qkv_proj", own.query_tokens, stack.d, own.qkv_width, x, bias)]
    keys = own.key_tokens, own.key_width, own.kv_heads * own.head_dim, own.key_input
    return [
        own.linear("q_proj", own.query_tokens, stack.d, own.heads * own.head_dim, x, bias),
        own.linear("k_proj", *keys, bias and stack.key_bias),
        own.linear("v_proj", *keys, bias),
    ]


def _latent_projections(own: _Attention, latent: Latent) -> list[Operation]:
    stack, tokens, x = own.stack, own.query_tokens, f"{own.prefix}.x"
    ops: list[Operation] = []

    def linear(name: str, width: int, outputs: int, source: str, bias: bool = False) -> None:
        name = f"{own.prefix}.{name}"
        ops.append(Gemm(name, tokens, width, outputs, input=source, bias=bias, quantised=stack.converted))

    def narrowed(name: str, rank: int, more: int) -> str:
        linear(f"{name}_a_proj", stack.d, rank + more, x, stack.qkv_bias)
        ops.append(own.pointwise(f"{name}_a_norm", "rms", tokens, rank, parameters=rank))
        return f"{own.prefix}.{name}_a_norm"

    source = narrowed("q", latent.query_rank, 0) if latent.query_rank else x
    linear("q_b_proj", latent.query_rank or stack.d, own.heads * own.head_dim, source)
    source = narrowed("kv", latent.key_rank, latent.rotary)
    linear("kv_b_proj", latent.key_rank, own.heads * (latent.plain + latent.value), source)
    return ops


def _query_key_norms(own: _Attention) -> list[Operation]:
    if not own.stack.qk_norm:
        return []
    ops: list[Operation] = []
    sizes = (own.query_tokens, own.heads), (own.key_tokens, own.kv_heads)
    for name, (tokens, heads) in zip(HEAD_NORMS, sizes, strict=True):
        by_head = own.stack.qk_norm == "head"
        rows, width = (tokens * heads, own.head_dim) if by_head else (tokens, heads * own.head_dim)
        ops.append(own.pointwise(name, "rms", rows, width, parameters=width))
    return ops


def _rotary_positions(own: _Attention) -> list[Operation]:
    latent = own.stack.latent
    width = latent.rotary if latent else round(own.stack.rotary * own.head_dim)
    if not width:
        return []
    return [
        own.pointwise("q_rotary", "rotary", own.query_tokens * own.heads, width),
        own.pointwise("k_rotary", "rotary", own.key_tokens * (1 if latent else own.kv_heads), width),
    ]


def _copies_for_products(own: _Attention) -> list[Operation]:
    """Copies that torch.matmul reads: keys are transposed, and values repeated where heads share them."""
    split = own.stack.heads_copied and own.stack.fused_qkv
    return [
        *([own.pointwise("qkv_split", "split", own.query_tokens, own.qkv_width)] if split else []),
        *_head_copy(own, "q", "heads", own.query_tokens, own.head_dim),
        *_head_copy(own, "k", "transposed", own.key_tokens, own.head_dim),
        *_head_copy(own, "v", "heads", own.key_tokens, own.value_dim),
    ]


def _head_copy(own: _Attention, name: str, kind: str, tokens: int, width: int) -> list[Operation]:
    """A copy of every head, ``width`` wide, where heads are copied."""
    if not own.stack.heads_copied:
        return []
    return [own.pointwise(f"{name}_heads", kind, tokens * own.heads, width, cls="attention")]


def _products(own: _Attention) -> list[Operation]:
    """Queries by keys, what happens to the scores, and those by values."""
    stack, crosses = own.stack, own.crosses
    sharing = own.heads // own.kv_heads  # grouped-query attention: the heads that share keys are rows of one product
    batch, rows = own.sequences * own.kv_heads, own.query_length * sharing
    pairs = sharing * _pairs(own.query_length, own.key_length, stack.causal, own.window)
    position_bias = bool(stack.position_bias)

    def product(name: str, width: int, outputs: int, source: str = "") -> Gemm:
        fields: dict[str, Any] = {"weight": False, "quantised": False, "pairs": pairs, "input": source}
        fields |= {"fused_once": crosses and position_bias}
        return Gemm(f"{own.prefix}.{name}", rows, width, outputs, batch, "attention", **fields)

    def on_scores(name: str, kind: str, **fields: Any) -> Pointwise:
        return own.pointwise(name, kind, batch * rows, own.key_length, cls="attention", **fields)

    square = own.query_length * own.key_length
    mask = own.sequences * square if stack.causal or own.window else 0
    bias = own.heads * square if position_bias else 0
    weights = f"{own.prefix}.softmax" if not stack.attention_dropout else ""
    return [
        product("scores", own.head_dim, own.key_length),
        on_scores("scale", "bias" if position_bias and not crosses else "scale", mask=mask, bias=bias),
        on_scores("softmax", "softmax"),
        *([on_scores("dropout", "dropout")] if stack.attention_dropout else []),
        product("context", own.key_length, own.value_dim, weights),
    ]


def _pairs(queries: int, keys: int, causal: bool, window: int) -> int:
    """Pairs of a query and a key that it sees, of one head; 0: all of them."""
    if not causal and not window:
        return 0
    seen = min(window or keys, keys)
    causal_pairs = seen * (seen + 1) // 2 + (queries - seen) * seen
    return causal_pairs if causal else 2 * causal_pairs - queries  # the same to the other side; itself once
