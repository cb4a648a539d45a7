"""What one device of several has of a transformer: tensor parallelism (Shoeybi et al., 2019), its sequence parallelism
(Korthikanti et al., 2022) and pipeline stages."""

from dataclasses import dataclass, replace
from typing import Any

from costmodel.model.operations import Gemm, Operation, Workload
from costmodel.workloads.shapes import Head, Stack, Transformer
from costmodel.workloads.transformer import HEAD_NORMS, build

#: passes over the residual stream, whose tokens sequence parallelism shares out
_STREAM_KINDS = ("norm", "rms", "late rms", "residual", "dropout", "embedding")


@dataclass(frozen=True)
class Shard:
    """The number of parts into which a model is cut."""

    tensor: int = 1  #: heads and MLP widths
    pipeline: int = 1  #: layers
    sequence: bool = False  #: tokens of what tensor parallelism leaves whole

    @property
    def devices(self) -> int:
        return self.tensor * self.pipeline

    def __str__(self) -> str:
        parts = [f"TP {self.tensor}"] if self.tensor > 1 else []
        parts += ["SP"] if self.sequence else []
        parts += [f"PP {self.pipeline}"] if self.pipeline > 1 else []
        return " ".join(parts)


def stages(model: Transformer, shard: Shard) -> tuple[Workload, ...]:
    """The operations of a device of the first stage, and of the last where there are several. Raises ValueError where
    the model cannot be cut so."""
    if shard.pipeline == 1:
        return (_parallel(build(_part(model, shard)), shard),)
    if model.encoder and model.decoder:
        raise ValueError(f"{model.name}: a pipeline is described for one stack of layers, not for two")
    side = "encoder" if model.encoder else "decoder"
    whole: Stack = getattr(model, side)
    layers = _divided(whole, "layers", shard.pipeline)
    changes: Any = {side: replace(whole, layers=layers, final_norm=False)}
    first = replace(model, head=Head("none"), **changes)
    changes = {side: replace(whole, layers=layers, tables=(), patches=None, embedding_norm=False)}
    last = replace(model, head=replace(model.head, tied=False), **changes)  # with a table of its own
    return tuple(_parallel(build(_part(part, shard)), shard) for part in (first, last))


def _part(model: Transformer, shard: Shard) -> Transformer:
    """The model with 1 / tensor of its heads, MLP widths, tables and logits."""
    if shard.tensor == 1:
        return model
    cut: Any = {side: _cut(stack, shard.tensor) for side in ("encoder", "decoder") if (stack := getattr(model, side))}
    return replace(model, head=replace(model.head, outputs=-(-model.head.outputs // shard.tensor)), **cut)


def _cut(stack: Stack, parts: int) -> Stack:
    heads, experts = _divided(stack, "heads", parts), stack.experts
    if stack.keys % parts and parts % stack.keys:
        raise ValueError(f"{stack.name}.kv_heads ({stack.keys}) cannot be cut into {parts}, nor copied to as many")
    if experts:
        experts = replace(experts, width=-(-experts.width // parts))
    return replace(
        stack,
        heads=heads,
        kv_heads=max(1, stack.keys // parts),
        head_dim=stack.head_width,
        ffn=_divided(stack, "ffn", parts),
        experts=experts,
        tables=tuple((name, -(-rows // parts)) for name, rows in stack.tables),
    )


def _divided(stack: Stack, field: str, parts: int) -> int:
    value: int = getattr(stack, field)
    if value % parts:
        raise ValueError(f"{stack.name}.{field} ({value}) cannot be cut into {parts}")
    return value // parts


def _parallel(workload: Workload, shard: Shard) -> Workload:
    """The workload with the tokens of the residual stream shared out."""
    if not shard.sequence:
        return workload

    def share(op: Operation) -> Operation:
        if isinstance(op, Gemm):
            return replace(op, x_values=-(-op.M * op.K // shard.tensor)) if op.stream else op
        of_heads = op.cls == "attention" or op.name.rpartition(".")[2] in HEAD_NORMS
        shared = op.kind in _STREAM_KINDS and not of_heads
        return replace(op, rows=-(-op.rows // shard.tensor)) if shared else op

    return replace(workload, operations=tuple(map(share, workload.operations)))
