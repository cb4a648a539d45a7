"""The operations of a transformer's training step, in order: matrix products and pointwise passes, from its shapes."""

from dataclasses import replace
from typing import Any

from costmodel.model.ledger import BATCH
from costmodel.model.operations import CAST, ENCODER_OUT, Gemm, Operation, Pointwise, Workload
from costmodel.workloads.attention import added_to_scores, attention
from costmodel.workloads.shapes import Convolution, Head, MixtureOfExperts, Stack, Transformer


def build(model: Transformer) -> Workload:
    """The operations of one training step."""
    ops: list[Operation] = []
    source_tokens, target_tokens = (model.sequences * n for n in (model.source_length, model.target_length))
    if model.encoder:
        ops += _stack(model.encoder, model, model.source_length)
    if model.decoder:
        ops += _stack(model.decoder, model, model.target_length)
    last = model.decoder or model.encoder
    assert last is not None
    ops += _head(model.head, last.d, target_tokens if model.decoder else source_tokens, model.sequences)
    ops = _mark_stream(ops)
    if model.head.kind == "lm" and model.head.tied:
        ops.insert(0, Pointwise("tied weights", "tied", last.d, model.head.outputs))
    tokens = (source_tokens if model.encoder else 0) + (target_tokens if model.decoder else 0)
    ops.append(Pointwise("optimiser", "adam", sum(op.parameters for op in ops if op.trains), 1))
    return Workload(model.name, tuple(ops), tokens, model.source)


#: pointwise operations whose output is of a layer's branch
_BRANCH = ("activation", "relu", "gate", "expert gate")


def _mark_stream(ops: list[Operation]) -> list[Operation]:
    """The layers whose x is no product's or activation's output."""
    branch = {op.name for op in ops if isinstance(op, Gemm) or op.kind in _BRANCH}
    return [
        replace(op, stream=True)
        if isinstance(op, Gemm) and op.weight and op.input.removesuffix(" (copy)") not in branch
        else op
        for op in ops
    ]


def _stack(stack: Stack, model: Transformer, length: int) -> list[Operation]:
    tokens = model.sequences * length
    ops = _embeddings(stack, model.sequences, length) + added_to_scores(stack, model, length)
    for layer in range(stack.layers):
        ops += _layer(stack, layer, model, length)
    if stack.final_norm:
        ops.append(_norm(f"{stack.name}.final_norm", tokens, stack.d, stack))
    return ops


def _embeddings(stack: Stack, sequences: int, length: int) -> list[Operation]:
    ops: list[Operation] = []
    name, tokens, width = stack.name, sequences * length, stack.embedding_width or stack.d
    for index, convolution in enumerate(stack.convolutions):
        source = f"{name}.{stack.convolutions[index - 1].name}.activation" if index else BATCH
        ops += _convolution(convolution, f"{name}.{convolution.name}", sequences, source)
    for index, (table, rows, columns) in enumerate(stack.tables):
        trained = table not in stack.frozen
        owned: dict[str, Any] = {"parameters": rows * columns, "trained": trained}
        ops.append(Pointwise(f"{name}.{table}", "embedding", tokens, columns, **owned))
        if index or stack.convolutions:
            ops.append(Pointwise(f"{name}.{table}.add", "residual", tokens, columns))
    if stack.embedding_norm:
        ops.append(_norm(f"{name}.embedding_norm", tokens, width, stack))
    if stack.dropout:
        ops.append(Pointwise(f"{name}.dropout", "dropout", tokens, width))
    if stack.embedding_width:
        wide = f"{name}.embedding_projection"
        ops.append(Gemm(wide, tokens, width, stack.d, bias=True, quantised=stack.converted, input=f"{wide}.x"))
    if stack.extra_parameters:
        ops.append(Pointwise(f"{name}.extra", "parameters", 1, 1, parameters=stack.extra_parameters))
    return ops


def _convolution(made: Convolution, name: str, sequences: int, source: str) -> list[Operation]:
    rows, width = sequences * made.positions, made.channels * made.kernel
    sizes: dict[str, Any] = {"bias": made.bias, "x_grad": source != BATCH, "input": source}
    sizes["quantised"] = made.kernel == made.stride  # which cuts patches
    ops: list[Operation] = [Gemm(name, rows, width, made.outputs, x_values=rows * made.channels * made.stride, **sizes)]
    if made.activation:
        ops.append(Pointwise(f"{name}.activation", "activation", rows, made.outputs))
    return ops


def _layer(stack: Stack, layer: int, model: Transformer, length: int) -> list[Operation]:
    prefix, tokens = f"{stack.name}.layers.{layer}", model.sequences * length
    ops: list[Operation] = []
    count = (stack.first_norms if layer == 0 and stack.first_norms >= 0 else stack.norms) + stack.cross
    norms = [_norm(f"{prefix}.norm{index}", tokens, stack.d, stack) for index in range(count)]
    both_sides = count > 2 + stack.cross

    def norm(here: bool) -> None:
        if here and norms:
            ops.append(norms.pop(0))

    def sublayer(name: str, inside: list[Operation]) -> None:
        norm(not stack.post_norm)
        ops.extend(inside)
        norm(both_sides)
        if stack.dropout:
            ops.append(Pointwise(f"{prefix}.{name}.out_dropout", "dropout", tokens, stack.d))
        ops.append(Pointwise(f"{prefix}.{name}.add", "residual", tokens, stack.d))
        norm(stack.post_norm)

    window = stack.windows[layer % len(stack.windows)] if stack.windows else 0
    own = (length, f"{prefix}.self_attn.x", stack.d)
    inside = attention(f"{prefix}.self_attn", stack, model.sequences, length, *own, window)
    if stack.position_bias and layer == 0:
        size = (length * length, stack.heads, "attention", stack.position_bias * stack.heads)
        inside.insert(0, Pointwise(f"{prefix}.self_attn.position_bias", "position bias", *size))
    sublayer("self_attn", inside)
    if stack.cross:
        assert model.encoder is not None
        memory = (model.source_length, ENCODER_OUT, model.encoder.d)
        cross = replace(stack, causal=False)
        sublayer("encoder_attn", attention(f"{prefix}.encoder_attn", cross, model.sequences, length, *memory))
    source = f"{prefix}.{'self_attn' if stack.norms == 1 else 'mlp'}.x"  # behind one norm, side by side
    if stack.experts and layer not in stack.experts.dense_layers:
        sublayer("mlp", _experts(prefix, stack, stack.experts, tokens, source))
    else:
        sublayer("mlp", _mlp(f"{prefix}.", stack, tokens, stack.ffn, source))
    if stack.layer_parameters:
        ops.append(Pointwise(f"{prefix}.extra", "parameters", 1, 1, parameters=stack.layer_parameters))
    if stack.shared_layers and layer >= stack.shared_layers:
        return [_again(op) for op in ops]
    return ops


def _again(op: Operation) -> Operation:
    """The operation with parameters that another one counts."""
    return replace(op, tied=op.weight, bias=False) if isinstance(op, Gemm) else replace(op, parameters=0)


def _norm(name: str, tokens: int, width: int, stack: Stack) -> Pointwise:
    rms = "late rms" if stack.casts_late else "rms"
    kind, parameters = (rms, width) if stack.rms else ("norm", width * (1 + stack.norm_bias))
    return Pointwise(name, kind, tokens, width, parameters=parameters)


def _mlp(prefix: str, stack: Stack, tokens: int, width: int, source: str) -> list[Operation]:
    up = [f"{prefix}gate_proj", f"{prefix}up_proj"] if stack.gated else [f"{prefix}fc1"]
    down = f"{prefix}down_proj" if stack.gated else f"{prefix}fc2"
    own: dict[str, Any] = {"bias": stack.mlp_bias, "quantised": stack.converted, "transposed": stack.transposed}
    activated = f"{prefix}activation" + (CAST if stack.casts_late else "")
    return [
        *(Gemm(name, tokens, stack.d, width, input=source, **own) for name in up),
        Pointwise(f"{prefix}activation", "gate" if stack.gated else stack.activation, tokens, width),
        Gemm(down, tokens, width, stack.d, input=activated, **own),
    ]


def _experts(prefix: str, stack: Stack, experts: MixtureOfExperts, tokens: int, source: str) -> list[Operation]:
    """Rows are gathered by expert."""
    name, rows = f"{prefix}.experts", tokens * experts.chosen
    ours: dict[str, Any] = {"bias": experts.bias, "quantised": experts.converted, "weights": experts.count}
    router = Gemm(
        f"{prefix}.router", tokens, stack.d, experts.count, bias=experts.router_bias, quantised=False, input=source
    )
    ops: list[Operation] = [
        router,
        Pointwise(f"{prefix}.router.softmax", "softmax", tokens, experts.count),
        Gemm(f"{name}.gate_up_proj", rows, stack.d, 2 * experts.width, input=f"{name}.x", **ours),
        Pointwise(f"{name}.activation", "expert gate", rows, experts.width),
        Gemm(f"{name}.down_proj", rows, experts.width, stack.d, input=f"{name}.activation", **ours),
        Pointwise(f"{name}.weighted", "expert weights", rows, stack.d),
    ]
    if experts.shared:
        ops += _mlp(f"{prefix}.shared_", stack, tokens, experts.shared, source)
        ops.append(Pointwise(f"{prefix}.shared_.add", "residual", tokens, stack.d))
    return ops


def _head(head: Head, d: int, tokens: int, sequences: int) -> list[Operation]:
    rows, width = tokens if head.kind == "lm" else sequences, head.width or d
    whole = 0 if head.kind == "lm" else tokens * d  # a view of all positions is read
    ops: list[Operation] = []
    if head.dense:
        ops.append(Gemm("head.dense", rows, d, width, bias=head.dense_bias, input="head.x", x_values=whole))
        whole = 0
        ops.append(Pointwise("head.activation", "activation", rows, width))
    if head.norm:
        ops.append(Pointwise("head.norm", "norm", rows, width, parameters=width * (1 + head.norm_bias)))
    if head.kind != "none":
        name = "output_projection"
        ops.append(
            Gemm(name, rows, width, head.outputs, bias=head.bias, tied=head.tied, input=f"{name}.x", x_values=whole)
        )
        ops.append(Pointwise("loss", "loss of fp32" if head.upcasts else "loss", rows, head.outputs))
    return ops
