"""Small transformers in plain PyTorch, built from the cost model's own shapes: what its predictions are held
against."""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dsq.costmodel.model.operations import Gemm, Operation, Pointwise, Workload
from dsq.costmodel.workloads.shapes import Head, Stack, Transformer


def quantising_attention(workload: Workload) -> Workload:
    """The workload with attention's two products quantised. Fused ones come apart, as dsq's do: their scores are
    stored, and the softmax keeps its result."""
    operations: list[Operation] = []
    for op in workload.operations:
        if isinstance(op, Gemm) and not op.weight:
            if op.on_chip == "x":
                scores, prefix = (op.batch * op.M, op.K, "attention"), op.name.rpartition(".")[0]
                operations += [Pointwise(f"{prefix}.{kind}", kind, *scores) for kind in ("scale", "softmax")]
            op = replace(op, quantised=True, on_chip="", recompute=0)
        operations.append(op)
    return replace(workload, operations=tuple(operations))


def dump(workload: Workload) -> dict[str, object]:
    """The data of a workload file."""
    operations = [{"op": "gemm" if isinstance(op, Gemm) else "pointwise", **vars(op)} for op in workload.operations]
    return {"costmodel": 1, "name": workload.name, "tokens": workload.tokens, "source": workload.source} | {
        "operations": operations
    }


class Attention(nn.Module):
    def __init__(self, stack: Stack, key_width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads = stack.heads, stack.kv_heads or stack.heads
        self.head_dim = stack.head_dim or stack.d // stack.heads
        self.q_proj = nn.Linear(stack.d, self.heads * self.head_dim, bias=stack.qkv_bias)
        self.k_proj = nn.Linear(key_width, self.kv_heads * self.head_dim, bias=stack.qkv_bias)
        self.v_proj = nn.Linear(key_width, self.kv_heads * self.head_dim, bias=stack.qkv_bias)
        self.out_proj = nn.Linear(self.heads * self.head_dim, stack.d, bias=stack.out_bias)
        if stack.qk_norm:
            self.q_norm, self.k_norm = nn.RMSNorm(self.head_dim), nn.RMSNorm(self.head_dim)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (
            y.view(*y.shape[:2], -1, self.head_dim).transpose(1, 2)
            for y in (self.q_proj(x), self.k_proj(memory), self.v_proj(memory))
        )
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        repeat = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
        scores = torch.softmax(q @ k.transpose(2, 3) / self.head_dim**0.5, -1)
        return self.out_proj((scores @ v).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, stack: Stack, memory_width: int) -> None:
        super().__init__()
        self.self_attn = Attention(stack, stack.d)
        self.encoder_attn = Attention(stack, memory_width) if stack.cross else None
        self.gated = stack.gated
        names = ("gate_proj", "up_proj", "down_proj") if stack.gated else ("fc1", "fc2")
        for name in names[:-1]:
            setattr(self, name, nn.Linear(stack.d, stack.ffn, bias=stack.mlp_bias))
        setattr(self, names[-1], nn.Linear(stack.ffn, stack.d, bias=stack.mlp_bias))
        norm = nn.RMSNorm if stack.rms else nn.LayerNorm
        self.norms = nn.ModuleList(norm(stack.d) for _ in range(stack.norms + stack.cross))

    def forward(self, x: Tensor, memory: Tensor | None) -> Tensor:
        x = self.norms[0](x + self.self_attn(x, x))
        if self.encoder_attn is not None:
            x = self.norms[2](x + self.encoder_attn(x, memory))
        if self.gated:
            return self.norms[1](x + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))
        return self.norms[1](x + self.fc2(F.relu(self.fc1(x))))


class StackModule(nn.Module):
    def __init__(self, stack: Stack, memory_width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, stack.d) for _, rows in stack.tables if rows)
        self.layers = nn.ModuleList(Layer(stack, memory_width) for _ in range(stack.layers))

    def forward(self, ids: Tensor, memory: Tensor | None = None) -> Tensor:
        x = sum(table(ids) for table in self.tables)
        for layer in self.layers:
            x = layer(x, memory)
        return x


class Model(nn.Module):
    """Names its linear layers as the cost model does: encoder.layers.0.self_attn.q_proj, ..., output_projection."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        width = model.encoder.d if model.encoder else 0
        self.encoder = StackModule(model.encoder, width) if model.encoder else None
        self.decoder = StackModule(model.decoder, width) if model.decoder else None
        last = model.decoder or model.encoder
        self.output_projection = nn.Linear(last.d, model.head.outputs, bias=model.head.bias)
        self.classes = model.head.kind == "classes"
        if model.head.tied:
            self.output_projection.weight = (self.decoder or self.encoder).tables[0].weight

    def forward(self, source: Tensor | None, target: Tensor | None) -> Tensor:
        hidden = self.encoder(source) if self.encoder else None
        if self.decoder:
            hidden = self.decoder(target, hidden)
        return self.output_projection(hidden[:, 0].contiguous() if self.classes else hidden)


#: sizes that divide neither by 8 nor by 16, so that every rounding up shows
ENCODER_DECODER = Transformer(
    "encoder_decoder",
    Head("lm", 29, tied=True),
    encoder=Stack("encoder", 2, 24, heads=3, ffn=50, tables=(("words", 31), ("positions", 31))),
    decoder=Stack("decoder", 2, 20, heads=2, ffn=36, cross=True, tables=(("words", 29),)),
    sequences=3,
    source_length=7,
    target_length=5,
)
ENCODER = Transformer(
    "encoder",
    Head("classes", 3, bias=True),
    encoder=Stack("encoder", 2, 30, heads=5, ffn=44, tables=(("words", 40),)),
    sequences=2,
    source_length=9,
)
_BIASES = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), False)
_GATED = Stack("decoder", 2, 24, heads=4, ffn=42, kv_heads=2, head_dim=10, gated=True, rms=True, **_BIASES)
GATED_DECODER = Transformer(
    "gated_decoder",
    Head("lm", 33),
    decoder=replace(_GATED, qk_norm=True, tables=(("words", 33),)),
    sequences=2,
    target_length=19,
)
SHAPES = (ENCODER_DECODER, ENCODER, GATED_DECODER)


def ids(model: Transformer) -> tuple[Tensor | None, Tensor | None]:
    """Example token ids of the model's batch."""
    generator = torch.Generator().manual_seed(0)

    def batch(length: int) -> Tensor:
        return torch.randint(29, (model.sequences, length), generator=generator)

    source = batch(model.source_length) if model.encoder else None
    return source, batch(model.target_length) if model.decoder else None


def converting_tied(workload: Workload) -> Workload:
    """The workload of a model of ``dsq.convert(tied=True)``: its tied output projection is converted too."""
    changed = (replace(op, quantised=True) if isinstance(op, Gemm) and op.tied else op for op in workload.operations)
    return replace(workload, operations=tuple(changed))
