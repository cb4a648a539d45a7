"""Changes of workloads that the cost model's users make otherwise: by conversion, or by a file."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsq.costmodel.model.operations import Gemm, Operation, Pointwise, Workload


def quantizing_attention(workload: Workload) -> Workload:
    """The workload with attention's two products quantized. Fused ones come apart, as dsq's do: their scores are
    stored, and the softmax keeps its result."""
    operations: list[Operation] = []
    for op in workload.operations:
        if isinstance(op, Gemm) and not op.weight:
            if op.on_chip == "x":
                scores, prefix = (op.batch * op.M, op.K, "attention"), op.name.rpartition(".")[0]
                operations += [Pointwise(f"{prefix}.{kind}", kind, *scores) for kind in ("scale", "softmax")]
            op = replace(op, quantized=True, on_chip="", recompute=0, saves=None if op.on_chip else op.saves)
        operations.append(op)
    return replace(workload, operations=tuple(operations))


def dump(workload: Workload) -> dict[str, object]:
    """The data of a workload file."""
    operations = [{"op": "gemm" if isinstance(op, Gemm) else "pointwise", **vars(op)} for op in workload.operations]
    for entry in operations:
        saves = entry.pop("saves")
        entry |= {} if saves is None else {"saves": [list(vars(saved).values()) for saved in saves]}
    return {"costmodel": 1, "name": workload.name, "tokens": workload.tokens, "source": workload.source} | {
        "operations": operations
    }


def small_gpt2(folder: Path, **fields: Any) -> str:
    """The path of a config.json in ``folder``, of a GPT-2 of 2 layers, 64 wide, with these fields besides."""
    sizes = {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 1000, "n_positions": 128}
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]} | sizes | fields))
    return str(path)
