"""The operations of a transformer's training step, in order, from its shapes: of the whole, or of one device's part."""

from dataclasses import dataclass, replace
from typing import Any

from dsq.costmodel.model.ledger import BATCH
from dsq.costmodel.model.operations import CAST, ENCODER_OUT, Gemm, Operation, Pointwise, Workload
from dsq.costmodel.workloads.shapes import Head, MixtureOfExperts, Stack, Transformer

#: norms of queries and of keys: passes over heads, of which tensor parallelism gives each device its own
HEAD_NORMS = ("q_norm", "k_norm")
#: pointwise operations whose output is of a layer's branch
_BRANCH = ("activation", "relu", "gelu_new", "quick_gelu", "gate", "expert gate", "product")


def build(model: Transformer) -> Workload:
    """Return the operations of one training step, its attention unfused (see Workload.fusing_attention)."""
    ops: list[Operation] = []
    source_tokens, target_tokens = (model.sequences * n for n in (model.source_length, model.target_length))
    for stack, length in ((model.encoder, model.source_length), (model.decoder, model.target_length)):
        ops += _stack(stack, model, length) if stack else []
    last = model.decoder or model.encoder
    assert last is not None
    ops += _head(model.head, last, target_tokens if model.decoder else source_tokens, model.sequences)
    branch = {op.name for op in ops if isinstance(op, Gemm) or op.kind in _BRANCH}
    ops = [
        replace(op, stream=True) if isinstance(op, Gemm) and op.weight and op.input not in branch else op for op in ops
    ]
    if model.head.kind == "lm" and model.head.tied:
        ops.insert(0, Pointwise("tied weights", "tied", last.d, model.head.outputs))
    tokens = (source_tokens if model.encoder else 0) + (target_tokens if model.decoder else 0)
    ops.append(Pointwise("optimizer", "adam", sum(op.parameters for op in ops if op.trains), 1))
    images = model.encoder is not None and model.encoder.patches is not None
    return Workload(model.name, tuple(ops), tokens, model.source, model.source_length if images else 0)


def _stack(stack: Stack, model: Transformer, length: int) -> list[Operation]:
    tokens, dropout = model.sequences * length, stack.dropout and stack.more_dropout
    ops = _embeddings(stack, model.sequences, length) + _added_to_scores(stack, model, length)
    for layer in range(stack.layers):
        ops += _layer(stack, layer, model, length)
    ops += [_norm(f"{stack.name}.final_norm", tokens, stack)] * stack.final_norm
    return ops + [Pointwise(f"{stack.name}.final_dropout", "dropout", tokens, stack.d, container="r")] * dropout


def _embeddings(stack: Stack, sequences: int, length: int) -> list[Operation]:
    name, tokens, patches = stack.name, sequences * length, stack.patches
    ops: list[Operation] = []
    if patches:  # of pictures, of which every pixel is in one patch
        rows, width = sequences * patches.count, patches.channels * patches.size**2
        ops.append(
            Gemm(f"{name}.patches", rows, width, stack.d, bias=True, input=BATCH, x_grad=False, x_values=rows * width)
        )
    for index, (table, rows) in enumerate(stack.tables):
        ops.append(Pointwise(f"{name}.{table}", "embedding", tokens, stack.d, parameters=rows * stack.d))
        if index or stack.patches:
            ops.append(Pointwise(f"{name}.{table}.add", "residual", tokens, stack.d))
    if stack.embedding_norm:
        ops.append(_norm(f"{name}.embedding_norm", tokens, stack))
    dropout = Pointwise(f"{name}.dropout", "dropout", tokens, stack.d, container="r")
    extra = Pointwise(f"{name}.extra", "parameters", 1, 1, parameters=stack.extra_parameters)
    return [*ops, *[dropout] * stack.dropout, *[extra] * bool(stack.extra_parameters)]


def _added_to_scores(stack: Stack, model: Transformer, length: int) -> list[Operation]:
    """Return the operations that run once for the scores of all layers: a mask, T5's zeros for cross-attention."""
    mask = Pointwise(f"{stack.name}.mask", "mask", model.sequences * length, length, cls="attention")
    zeros = stack.heads * length, model.source_length
    bias = Pointwise(f"{stack.name}.cross_bias", "zero bias", *zeros, cls="attention")
    return [*[mask] * bool(stack.causal or stack.window), *[bias] * bool(stack.position_bias and stack.cross)]


def _layer(stack: Stack, layer: int, model: Transformer, length: int) -> list[Operation]:
    prefix, tokens = f"{stack.name}.layers.{layer}", model.sequences * length
    ops: list[Operation] = []
    if stack.full_every and not (layer + 1) % stack.full_every:
        stack = replace(stack, window=0)
    norms = [_norm(f"{prefix}.norm{index}", tokens, stack) for index in range(stack.norms + stack.cross)]

    def sublayer(name: str, inside: list[Operation]) -> None:
        if norms and not stack.post_norm:
            ops.append(norms.pop(0))
        ops.extend(inside)
        if stack.sandwich_norm:
            ops.append(norms.pop(0))
        if stack.dropout:
            ops.append(Pointwise(f"{prefix}.{name}.out_dropout", "dropout", tokens, stack.d))
        ops.append(Pointwise(f"{prefix}.{name}.add", "residual", tokens, stack.d))
        if norms and stack.post_norm:
            ops.append(norms.pop(0))

    name = f"{prefix}.self_attn"
    inside = _attention(_Attention(name, stack, model.sequences, length, length, f"{name}.x", stack.d))
    if stack.position_bias and layer == 0:
        size = (length * length, stack.heads, "attention", stack.position_bias * stack.heads)
        inside.insert(0, Pointwise(f"{name}.position_bias", "position bias", *size))
    sublayer("self_attn", inside)
    if stack.cross:
        assert model.encoder is not None
        memory = (model.source_length, ENCODER_OUT, model.encoder.d)
        cross = _Attention(f"{prefix}.encoder_attn", replace(stack, causal=False), model.sequences, length, *memory)
        sublayer("encoder_attn", _attention(cross))
    source = f"{prefix}.{'self_attn' if stack.norms == 1 else 'mlp'}.x"  # behind one norm, side by side
    experts = stack.experts and _experts(prefix, stack, stack.experts, tokens, source)
    sublayer("mlp", experts or _mlp(f"{prefix}.", stack, tokens, source))
    return ops


def _norm(name: str, tokens: int, stack: Stack) -> Pointwise:
    rms = "late rms" if stack.casts_late else "rms"
    kind, parameters = (rms, stack.d) if stack.rms else ("norm", 2 * stack.d)
    return Pointwise(name, kind, tokens, stack.d, parameters=parameters)


def _mlp(prefix: str, stack: Stack, tokens: int, source: str) -> list[Operation]:
    up = [f"{prefix}gate_proj", f"{prefix}up_proj"] if stack.gated else [f"{prefix}fc1"]
    down = f"{prefix}down_proj" if stack.gated else f"{prefix}fc2"
    options: dict[str, Any] = {"bias": stack.mlp_bias, "transposed": stack.transposed}
    activated, width = f"{prefix}activation", stack.ffn
    passes = [Pointwise(activated, "gate" if stack.gated else stack.activation, tokens, width)]
    if stack.gated and stack.activation == "gelu_new":  # T5 v1.1: several kernels, and a product
        passes = [Pointwise(f"{prefix}gelu", "gelu_new", tokens, width), Pointwise(activated, "product", tokens, width)]
    if stack.dropout and stack.more_dropout:
        activated = f"{prefix}dropout"
        passes.append(Pointwise(activated, "dropout", tokens, width))
    return [
        *(Gemm(name, tokens, stack.d, width, input=source, **options) for name in up),
        *passes,
        Gemm(down, tokens, width, stack.d, input=activated + (CAST if stack.casts_late else ""), **options),
    ]


def _experts(prefix: str, stack: Stack, experts: MixtureOfExperts, tokens: int, source: str) -> list[Operation]:
    """Return a router and experts; rows are gathered by expert."""
    name, rows = f"{prefix}.experts", tokens * experts.per_token
    return [
        Gemm(f"{prefix}.router", tokens, stack.d, experts.count, quantized=False, input=source),
        Pointwise(f"{prefix}.router.softmax", "softmax", tokens, experts.count),
        Gemm(f"{name}.gate_up_proj", rows, stack.d, 2 * experts.width, input=f"{name}.x", weights=experts.count),
        Pointwise(f"{name}.activation", "expert gate", rows, experts.width),
        Gemm(f"{name}.down_proj", rows, experts.width, stack.d, input=f"{name}.activation", weights=experts.count),
        Pointwise(f"{name}.weighted", "expert weights", rows, stack.d),
    ]


def _head(head: Head, stack: Stack, tokens: int, sequences: int) -> list[Operation]:
    rows, d = tokens if head.kind == "lm" else sequences, stack.d
    whole = 0 if head.kind == "lm" else tokens * d  # a view of all positions is read
    dense = Gemm("head.dense", rows, d, d, bias=True, input="head.x", x_values=whole)
    ops: list[Operation] = [dense, Pointwise("head.activation", "activation", rows, d)] * head.dense
    ops += [Pointwise("head.norm", "norm", rows, d, parameters=2 * d)] * head.norm
    if head.kind != "none":
        ops.append(
            Gemm(
                "output_projection",
                rows,
                d,
                head.outputs,
                bias=head.bias,
                tied=head.tied,
                quantized=not head.tied,
                input="output_projection.x",
                x_values=0 if head.dense else whole,
            )
        )
        ops += [Pointwise("logits.cap", "cap", rows, head.outputs)] * stack.caps
        ops.append(Pointwise("loss", head.loss, rows, head.outputs))
    return ops


@dataclass(frozen=True)
class _Attention:
    """One attention of a layer, with the sizes that its operations share."""

    prefix: str
    stack: Stack
    sequences: int
    query_length: int
    key_length: int
    key_input: str  #: name of the tensor that keys and values are projected from; ENCODER_OUT: of cross-attention
    key_width: int

    @property
    def query_tokens(self) -> int:
        return self.sequences * self.query_length

    @property
    def key_tokens(self) -> int:
        return self.sequences * self.key_length

    def linear(self, name: str, tokens: int, width: int, outputs: int, source: str, bias: bool) -> Gemm:
        return Gemm(
            f"{self.prefix}.{name}",
            tokens,
            width,
            outputs,
            input=source,
            bias=bias,
            transposed=self.stack.transposed,
        )

    def pointwise(self, name: str, kind: str, rows: int, width: int, **fields: Any) -> Pointwise:
        return Pointwise(f"{self.prefix}.{name}", kind, rows, width, **fields)


def _attention(attention: _Attention) -> list[Operation]:
    """Return the operations of one attention, in order: projections, copies, two products with a materialized
    softmax."""
    stack, prefix = attention.stack, attention.prefix
    sizes = (attention.query_tokens, stack.heads * stack.head_width, stack.d)
    out = attention.linear("out_proj", *sizes, f"{prefix}.context", stack.out_bias)
    return [
        *_projections(attention),
        *_on_heads(attention),
        *_products(attention),
        *_head_copy(attention, "context", "heads", attention.query_tokens),
        out,
    ]


def _projections(attention: _Attention) -> list[Operation]:
    stack, bias, x = attention.stack, attention.stack.qkv_bias, f"{attention.prefix}.x"
    if stack.fused_qkv:
        return [attention.linear("qkv_proj", attention.query_tokens, stack.d, stack.qkv_width, x, bias)]
    queries = attention.linear("q_proj", attention.query_tokens, stack.d, stack.heads * stack.head_width, x, bias)
    keys = attention.key_tokens, attention.key_width, stack.keys * stack.head_width, attention.key_input, bias
    return [queries, attention.linear("k_proj", *keys), attention.linear("v_proj", *keys)]


def _on_heads(attention: _Attention) -> list[Operation]:
    """Return the norms and rotary positions of queries and keys, and the copies of heads that torch.matmul reads."""
    stack, width = attention.stack, attention.stack.head_width
    rotary_width = round(stack.rotary * width)
    inputs = ("q", attention.query_tokens * stack.heads), ("k", attention.key_tokens * stack.keys)
    return [
        *(
            attention.pointwise(f"{x}_norm", "rms", rows, width, parameters=width)
            for x, rows in inputs
            if stack.qk_norm
        ),
        *(attention.pointwise(f"{x}_rotary", "rotary", rows, rotary_width) for x, rows in inputs if rotary_width),
        *(
            [attention.pointwise("qkv_split", "split", attention.query_tokens, stack.qkv_width)]
            if stack.heads_copied and stack.fused_qkv
            else []
        ),
        *_head_copy(attention, "q", "heads", attention.query_tokens),
        *_head_copy(attention, "k", "transposed", attention.key_tokens),
        *_head_copy(attention, "v", "heads", attention.key_tokens),
    ]


def _head_copy(attention: _Attention, name: str, kind: str, tokens: int) -> list[Operation]:
    """Return a copy of every head, where heads are copied."""
    stack, size = attention.stack, (tokens * attention.stack.heads, attention.stack.head_width)
    return [attention.pointwise(f"{name}_heads", kind, *size, cls="attention")] * stack.heads_copied


def _products(attention: _Attention) -> list[Operation]:
    """Return the product of queries by keys, what happens to the scores, and the product by values."""
    stack, crosses = attention.stack, attention.key_input == ENCODER_OUT
    sharing = stack.heads // stack.keys  # grouped-query attention: the heads that share keys are rows of one product
    batch, rows = attention.sequences * stack.keys, attention.query_length * sharing
    pairs = sharing * _pairs(attention.query_length, attention.key_length, stack.causal, stack.window)

    def product(name: str, width: int, outputs: int, source: str = "") -> Gemm:
        return Gemm(
            f"{attention.prefix}.{name}",
            rows,
            width,
            outputs,
            batch,
            "attention",
            weight=False,
            quantized=False,
            pairs=pairs,
            input=source,
        )

    def on_scores(name: str, kind: str, **fields: Any) -> Pointwise:
        return attention.pointwise(name, kind, batch * rows, attention.key_length, cls="attention", **fields)

    square = attention.query_length * attention.key_length
    mask = attention.sequences * square if stack.causal or stack.window else 0
    bias = stack.heads * square if stack.position_bias else 0
    weights = f"{attention.prefix}.{'dropout' if stack.attention_dropout else 'softmax'}"
    return [
        product("scores", stack.head_width, attention.key_length),
        on_scores("scale", "bias" if stack.position_bias and not crosses else "scale", mask=mask, bias=bias),
        *([on_scores("cap", "cap")] if stack.caps else []),
        on_scores("softmax", "softmax", upcasts=stack.upcasts),
        *([on_scores("dropout", "dropout")] if stack.attention_dropout else []),
        product("context", attention.key_length, stack.head_width, weights),
    ]


def _pairs(queries: int, keys: int, causal: bool, window: int) -> int:
    """Return the pairs of a query and a key that it sees, of one head; 0: all of them."""
    if not causal:
        return 0
    span = min(window or keys, keys)
    return span * (span + 1) // 2 + (queries - span) * span


# ---- what one device of several has: tensor parallelism (Shoeybi et al., 2019), its sequence parallelism (Korthikanti
# et al., 2022) and pipeline stages

#: passes over the residual stream, whose tokens sequence parallelism shares out
_STREAM_KINDS = ("norm", "rms", "late rms", "residual", "dropout", "embedding")


@dataclass(frozen=True)
class Shard:
    """The number of parts into which a model is cut."""

    tensor: int = 1  #: heads and MLP widths, and the tokens of what these leave whole (sequence parallelism)
    pipeline: int = 1  #: layers

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        parts = [f"TP {self.tensor} SP"] * (self.tensor > 1) + [f"PP {self.pipeline}"] * (self.pipeline > 1)
        return " ".join(parts)


def stages(model: Transformer, shard: Shard) -> tuple[Workload, ...]:
    """Return the operations of a device of the first stage, and of the last. Raises ValueError where it cannot be cut
    so."""
    if shard.pipeline == 1:
        return (_parallel(build(_part(model, shard)), shard),)
    if model.encoder and model.decoder:
        raise ValueError(f"{model.name}: a pipeline is described for one stack of layers, not for two")
    side = "encoder" if model.encoder else "decoder"
    whole: Stack = getattr(model, side)
    if whole.layers < shard.pipeline:
        raise ValueError(f"--pipeline {shard.pipeline}: {model.name} has {whole.layers} layers, fewer than stages")
    quotient, remainder = divmod(whole.layers, shard.pipeline)  # the first stages have one layer more
    changes: Any = {side: replace(whole, layers=quotient + bool(remainder), final_norm=False)}
    first = replace(model, head=Head("none"), **changes)
    changes = {side: replace(whole, layers=quotient, tables=(), patches=None, embedding_norm=False)}
    last = replace(model, head=replace(model.head, tied=False), **changes)  # with a table of its own
    return tuple(_parallel(build(_part(part, shard)), shard) for part in (first, last))


def _part(model: Transformer, shard: Shard) -> Transformer:
    """Return the model with 1 / tensor of its heads, MLP widths, tables and logits."""
    encoder, decoder = (stack and _shard_stack(stack, shard.tensor) for stack in (model.encoder, model.decoder))
    head = replace(model.head, outputs=-(-model.head.outputs // shard.tensor))
    return replace(model, head=head, encoder=encoder, decoder=decoder)


def _shard_stack(stack: Stack, parts: int) -> Stack:
    for field, value in (("heads", stack.heads), ("ffn", stack.ffn)):
        if value % parts:
            raise ValueError(f"{stack.name}.{field} ({value}) cannot be cut into {parts}")
    if stack.keys % parts and parts % stack.keys:
        raise ValueError(f"{stack.name}.kv_heads ({stack.keys}) cannot be cut into {parts}, nor copied to as many")
    return replace(
        stack,
        heads=stack.heads // parts,
        kv_heads=max(1, stack.keys // parts),
        head_dim=stack.head_width,
        ffn=stack.ffn // parts,
        experts=stack.experts and replace(stack.experts, width=-(-stack.experts.width // parts)),
        tables=tuple((name, -(-rows // parts)) for name, rows in stack.tables),
    )


def _parallel(workload: Workload, shard: Shard) -> Workload:
    """Return the workload with the tokens of the residual stream shared out."""
    if shard.tensor == 1:
        return workload

    def share(op: Operation) -> Operation:
        if isinstance(op, Gemm):
            return replace(op, x_values=-(-op.M * op.K // shard.tensor)) if op.stream else op
        of_heads = op.cls == "attention" or op.name.rpartition(".")[2] in HEAD_NORMS
        shared = op.kind in _STREAM_KINDS and not of_heads
        return replace(op, rows=-(-op.rows // shard.tensor)) if shared else op

    return replace(workload, operations=tuple(map(share, workload.operations)))
