"""Transformers from stated shapes: every matrix product and pointwise pass of one training step, in order.

Covers encoders, decoders and encoder-decoders, grouped-query attention, gated MLPs, layer and RMS norms. Attention is
written as its two batched products with a materialised softmax (see Workload.fusing_attention for the fused kernel).
"""

from dataclasses import dataclass
from typing import Any

from costmodel.model.operations import Gemm, Operation, Pointwise, Workload
from dsq.arguments import whole_number

MAX_SIZE = 2**24
MAX_LAYERS = 4096


@dataclass(frozen=True)
class Stack:
    """A stack of alike layers."""

    name: str  #: "encoder" or "decoder"
    layers: int
    d: int  #: model width
    heads: int
    ffn: int  #: width of the MLP's hidden layer
    kv_heads: int = 0  #: key and value heads (grouped-query attention); 0: as many as heads
    head_dim: int = 0  #: 0: d / heads
    gated: bool = False  #: the MLP has a gate (SwiGLU, GeGLU): two up projections
    qkv_bias: bool = True
    out_bias: bool = True
    mlp_bias: bool = True
    rms: bool = False  #: norms have a scale only
    norms: int = 2  #: norms a layer has, without the one of cross-attention
    qk_norm: bool = False  #: queries and keys are normed, a scale of head_dim each
    cross: bool = False  #: attends to the encoder
    final_norm: bool = False
    embedding_norm: bool = False
    tables: tuple[tuple[str, int, int], ...] = ()  #: embeddings looked up at the input: (name, rows, width)
    activation: str = "activation"  #: "relu" keeps its output for the backward, others their input
    causal: bool = False  #: a query sees no later key
    window: int = 0  #: keys a query sees, itself the last of them; 0: all
    dropout: bool = False  #: after the embeddings and each sublayer
    attention_dropout: bool = False
    converted: bool = True  #: its linear layers are what dsq.convert converts
    extra_parameters: int = 0  #: parameters that belong to no operation (relative position biases)

    def __post_init__(self) -> None:
        for field in ("d", "heads", "ffn"):
            whole_number(f"{self.name}.{field}", getattr(self, field), 1, MAX_SIZE)
        whole_number(f"{self.name}.layers", self.layers, 1, MAX_LAYERS)
        heads = f"{self.name}.heads ({self.heads})"
        if not self.head_dim and self.d % self.heads:
            raise ValueError(f"{self.name}.d ({self.d}) must be a multiple of {heads}")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{heads} must be a multiple of {self.name}.kv_heads ({self.kv_heads})")


@dataclass(frozen=True)
class Head:
    """What turns the last hidden state into logits.

    kind "lm": a projection onto the vocabulary at every position; "classes": one at the first position of each
    sequence; "none": no logits, no loss.
    """

    kind: str = "lm"
    outputs: int = 0
    bias: bool = False
    tied: bool = False  #: the projection is the embedding table
    dense: bool = False  #: a d x d layer and an activation come before it (a pooler, or the transform of a masked LM)
    norm: bool = False  #: and a norm after that


@dataclass(frozen=True)
class Transformer:
    name: str
    head: Head
    encoder: Stack | None = None
    decoder: Stack | None = None
    sequences: int = 1
    source_length: int = 512
    target_length: int = 512
    source: str = ""

    def __post_init__(self) -> None:
        for field in ("sequences", "source_length", "target_length"):
            whole_number(field, getattr(self, field), 1, MAX_SIZE)


def build(model: Transformer) -> Workload:
    """The operations of one training step."""
    ops: list[Operation] = []
    source_tokens, target_tokens = (model.sequences * n for n in (model.source_length, model.target_length))
    if model.encoder:
        ops += _stack(model.encoder, model, source_tokens, model.source_length)
    if model.decoder:
        ops += _stack(model.decoder, model, target_tokens, model.target_length)
    last = model.decoder or model.encoder
    assert last is not None
    ops += _head(model.head, last.d, target_tokens if model.decoder else source_tokens, model.sequences)
    tokens = (source_tokens if model.encoder else 0) + (target_tokens if model.decoder else 0)
    ops.append(Pointwise("optimiser", "adam", sum(op.parameters for op in ops), 1))
    return Workload(model.name, tuple(ops), tokens, model.source)


def _stack(stack: Stack, model: Transformer, tokens: int, length: int) -> list[Operation]:
    ops: list[Operation] = []
    for index, (name, rows, width) in enumerate(stack.tables):
        ops.append(Pointwise(f"{stack.name}.{name}", "embedding", tokens, width, parameters=rows * width))
        if index:
            ops.append(Pointwise(f"{stack.name}.{name}.add", "residual", tokens, width))
    if stack.dropout:
        ops.append(Pointwise(f"{stack.name}.dropout", "dropout", tokens, stack.d))
    if stack.embedding_norm:
        ops.append(_norm(f"{stack.name}.embedding_norm", tokens, stack))
    if stack.extra_parameters:
        ops.append(Pointwise(f"{stack.name}.extra", "parameters", 1, 1, parameters=stack.extra_parameters))
    for layer in range(stack.layers):
        prefix = f"{stack.name}.layers.{layer}"
        own = (length, f"{prefix}.self_attn.x", stack.d)
        ops += _attention(f"{prefix}.self_attn", stack, model.sequences, length, *own)
        if stack.dropout:
            ops.append(Pointwise(f"{prefix}.self_attn.out_dropout", "dropout", tokens, stack.d))
        ops.append(Pointwise(f"{prefix}.self_attn.add", "residual", tokens, stack.d))
        if stack.cross:
            assert model.encoder is not None
            memory = (model.source_length, "encoder.out", model.encoder.d)
            ops += _attention(f"{prefix}.encoder_attn", stack, model.sequences, length, *memory)
            if stack.dropout:
                ops.append(Pointwise(f"{prefix}.encoder_attn.out_dropout", "dropout", tokens, stack.d))
            ops.append(Pointwise(f"{prefix}.encoder_attn.add", "residual", tokens, stack.d))
        ops += _mlp(prefix, stack, tokens)
        if stack.dropout:
            ops.append(Pointwise(f"{prefix}.mlp.out_dropout", "dropout", tokens, stack.d))
        ops.append(Pointwise(f"{prefix}.mlp.add", "residual", tokens, stack.d))
        ops += [_norm(f"{prefix}.norm{i}", tokens, stack) for i in range(stack.norms + stack.cross)]
    if stack.final_norm:
        ops.append(_norm(f"{stack.name}.final_norm", tokens, stack))
    return ops


def _norm(name: str, tokens: int, stack: Stack) -> Pointwise:
    return Pointwise(
        name, "rms" if stack.rms else "norm", tokens, stack.d, parameters=stack.d * (1 if stack.rms else 2)
    )


def _attention(
    prefix: str, stack: Stack, sequences: int, query_length: int, key_length: int, key_input: str, key_width: int
) -> list[Operation]:
    heads, kv_heads = stack.heads, stack.kv_heads or stack.heads
    head_dim = stack.head_dim or stack.d // heads
    queries, keys = sequences * query_length, sequences * key_length
    query_input = f"{prefix}.x"
    # grouped-query attention: the heads that share keys are rows of one product
    batch, rows = sequences * kv_heads, query_length * (heads // kv_heads)

    def linear(name: str, rows: int, width: int, outputs: int, source: str, bias: bool = stack.qkv_bias) -> Gemm:
        return Gemm(f"{prefix}.{name}", rows, width, outputs, input=source, bias=bias, quantised=stack.converted)

    pairs = 0
    if stack.causal and not prefix.endswith("encoder_attn"):
        seen = min(stack.window or key_length, key_length)
        pairs = heads // kv_heads * (seen * (seen + 1) // 2 + (query_length - seen) * seen)

    def product(name: str, width: int, outputs: int, source: str = "") -> Gemm:
        size = rows, width, outputs, batch
        own: dict[str, Any] = {"weight": False, "quantised": False, "pairs": pairs, "input": source}
        return Gemm(f"{prefix}.{name}", *size, "attention", **own)

    ops: list[Operation] = [
        linear("q_proj", queries, stack.d, heads * head_dim, query_input),
        linear("k_proj", keys, key_width, kv_heads * head_dim, key_input),
        linear("v_proj", keys, key_width, kv_heads * head_dim, key_input),
    ]
    if stack.qk_norm:
        ops.append(Pointwise(f"{prefix}.q_norm", "rms", queries * heads, head_dim, parameters=head_dim))
        ops.append(Pointwise(f"{prefix}.k_norm", "rms", keys * kv_heads, head_dim, parameters=head_dim))
    dropout = [Pointwise(f"{prefix}.dropout", "dropout", batch * rows, key_length, cls="attention")]
    dropout = dropout if stack.attention_dropout else []
    ops += [
        product("scores", head_dim, key_length),
        Pointwise(f"{prefix}.scale", "scale", batch * rows, key_length, cls="attention"),
        Pointwise(f"{prefix}.softmax", "softmax", batch * rows, key_length, cls="attention"),
        *dropout,
        product("context", key_length, head_dim, "" if dropout else f"{prefix}.softmax"),
        linear("out_proj", queries, heads * head_dim, stack.d, f"{prefix}.context", stack.out_bias),
    ]
    return ops


def _mlp(prefix: str, stack: Stack, tokens: int) -> list[Operation]:
    up = [f"{prefix}.gate_proj", f"{prefix}.up_proj"] if stack.gated else [f"{prefix}.fc1"]
    down = f"{prefix}.down_proj" if stack.gated else f"{prefix}.fc2"
    bias, own = stack.mlp_bias, stack.converted
    return [
        *(Gemm(name, tokens, stack.d, stack.ffn, bias=bias, quantised=own, input=f"{prefix}.mlp.x") for name in up),
        Pointwise(f"{prefix}.activation", "gate" if stack.gated else stack.activation, tokens, stack.ffn),
        Gemm(down, tokens, stack.ffn, stack.d, bias=bias, quantised=own, input=f"{prefix}.activation"),
    ]


def _head(head: Head, d: int, tokens: int, sequences: int) -> list[Operation]:
    rows = tokens if head.kind == "lm" else sequences
    ops: list[Operation] = []
    if head.dense:
        ops.append(Gemm("head.dense", rows, d, d, bias=True, input="head.x"))
        ops.append(Pointwise("head.activation", "activation", rows, d))
    if head.norm:
        ops.append(Pointwise("head.norm", "norm", rows, d, parameters=2 * d))
    if head.kind != "none":
        name = "output_projection"
        ops.append(Gemm(name, rows, d, head.outputs, bias=head.bias, tied=head.tied, input=f"{name}.x"))
        ops.append(Pointwise("loss", "loss", rows, head.outputs))
    return ops
