"""Memory as the ledger predicts it and as running models have it, on this machine's CPU.

python -m analysis.memory.prediction [--measured analysis/results/memory.json]

Saved: what malloc has given out between forward and backward. Peak: the most during both. Every malloc of the process
is counted (analysis/memory/allocator.py); parameters, gradients and batch are there before. Small models; "with
dropout": as their configurations have it, else without.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from analysis.library_models import fairseq_transformer, transformer
from analysis.memory.allocator import figures, step_bytes
from analysis.models import attach
from dsq.command import OneLineParser, guarded, table
from dsq.costmodel.model.memory import peak_memory
from dsq.costmodel.model.methods import AUTOCAST, BF16, DSQ, FP32, POLICIES, Method, Setup, whole_stash
from dsq.costmodel.model.operations import Workload
from dsq.costmodel.workloads.named import load_shapes, load_workload
from dsq.costmodel.workloads.shapes import Transformer
from dsq.costmodel.workloads.transformer import build
from dsq.precision import Precision

Record = dict[str, Any]
MEGA = 1e6

WORDS, WIDTH, BLOCKS, HEADS, BATCH = 1000, 128, 4, 4, (16, 128)
LARGE = "gpt2-124m"  #: the model of full size
#: batches that are other ones; the ViT's is of 16 images
BATCHES = {LARGE: (2, 128), "vit": (18, 128)}
FAIRSEQ = "fairseq"
#: name -> fields of its configuration that are not the usual ones
MODELS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": 128, "activation_function": "gelu"},
    LARGE: {"activation_function": "gelu"},
    "llama": {"intermediate_size": 352},
    "bert": {},
    "opt": {},
    "t5": {},
    "vit": {"image_size": 96, "num_labels": 2},
    "mixtral": {"intermediate_size": 352, "num_key_value_heads": 4},
}
MODELS |= {f"{name} with dropout": MODELS[name] | {"dropout": True} for name in ("gpt2", "bert", "t5")}
NAMES = (*MODELS, FAIRSEQ)


@dataclass(frozen=True)
class CheckedModel:
    """A model, the loss of its batch, and what the cost model makes of it."""

    model: nn.Module
    loss: Callable[[], Tensor]
    workload: Workload


def checked_model(name: str) -> CheckedModel:
    torch.manual_seed(0)
    if name == FAIRSEQ:
        return _fairseq()
    batch, more = BATCHES.get(name, BATCH), MODELS[name]
    if name == LARGE:
        model, inputs = transformer("gpt2", 768, 12, 12, 50257, batch, **more)
    else:
        name = name.split()[0]
        model, inputs = transformer(name, WIDTH, BLOCKS, HEADS, WORDS, batch, **more)
    source, target = {"source_length": BATCH[1]}, {"target_length": BATCH[1]}
    lengths: dict[str, int] = {"vit": {}, "t5": source | target, "bert": source}.get(name, target)

    def loss() -> Tensor:
        wanted = next(model.parameters()).dtype
        for key, x in inputs.items():
            inputs[key] = x.to(wanted) if x.is_floating_point() else x
        return model(**inputs).loss

    return CheckedModel(model, loss, workload_of(model, len(inputs["labels"]), **lengths))


def workload_of(model: Any, sequences: int, **lengths: int) -> Workload:
    """Describe a model of transformers to the cost model, by its config.json and the attention that it runs."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(model.config.to_dict() | {"architectures": [type(model).__name__]}))
        fused = None if model.config._attn_implementation == "sdpa" else False
        return load_workload(str(path), fused, cpu=True, sequences=sequences, **lengths)


def _fairseq() -> CheckedModel:
    model, inputs, shapes = fairseq(WIDTH, BLOCKS, HEADS, WORDS, BATCH)

    def loss() -> Tensor:
        logits = model(**inputs)[0]
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), inputs["src_tokens"].flatten())

    return CheckedModel(model, loss, build(replace(shapes, head=replace(shapes.head, loss="loss of fp32"))))


def fairseq(
    width: int, blocks: int, heads: int, words: int, batch: tuple[int, int]
) -> tuple[nn.Module, dict[str, Tensor], Transformer]:
    """fairseq's transformer, a batch of (sequences, tokens), and what the cost model knows of both."""
    model, inputs = fairseq_transformer(width, blocks, heads, words, batch)
    for module in model.modules():
        if type(module).__name__ == "MultiheadAttention":
            module.skip_embed_dim_check = True  # type: ignore[assignment] # as fairseq_plugin: it calls its Linears
    shape = load_shapes("transformer_iwslt_de_en")
    assert shape.encoder is not None
    assert shape.decoder is not None
    sizes: dict[str, Any] = {"layers": blocks, "d": width, "heads": heads, "ffn": 4 * width, "dropout": False}
    sizes["tables"] = (("embed_tokens", words),)
    stacks: dict[str, Any] = {"encoder": replace(shape.encoder, **sizes), "decoder": replace(shape.decoder, **sizes)}
    lengths: dict[str, Any] = {"sequences": batch[0], "source_length": batch[1], "target_length": batch[1]}
    return model, inputs, replace(shape, head=replace(shape.head, outputs=words), **stacks, **lengths)


@dataclass(frozen=True)
class CheckedMethod:
    """How a model runs, and what is predicted."""

    name: str
    predicted: Method
    setup: str  #: a name that analysis/models.py reads
    frozen: bool = False  #: its linear layers are not trained


#: linear layers by their names in a workload; experts are none
LINEARS = r"^(?!.*experts).*(_proj|fc\d|router|dense|output_projection)$"


def _dsq(levels: str) -> CheckedMethod:
    return CheckedMethod(f"dsq {levels}", Method("", Setup(DSQ, Precision.parse(levels))), f"bf16 + {levels} tied")


def _whole(levels: str) -> CheckedMethod:
    setup = Setup(DSQ, Precision.parse(levels), container=32)
    return CheckedMethod(f"dsq {levels} all", Method("", setup, stash=whole_stash(setup)), f"{levels} whole tied")


def _policy(name: str, setup: str = "") -> CheckedMethod:
    return CheckedMethod(name, Method("", FP32, stash=POLICIES[name]), setup or name)


#: the blocks of every stack are recomputed: a name whose first number is its last part
_CHECKPOINT = r"checkpoint \D*\.\d+"
RECOMPUTED = Method("", FP32, recompute=True)
METHODS = (
    CheckedMethod("fp32", Method("", FP32), "fp32"),
    CheckedMethod("bf16", Method("", BF16), "bf16"),
    CheckedMethod("bf16 autocast", Method("", AUTOCAST), "bf16 autocast"),
    *map(_dsq, ("[16,4,4,16]", "[2,2,2,16]")),
    _whole("[8,4,8,8]"),
    _policy("bfp 4", "snvint 4"),
    _policy("gact 4", "gact 4 uniform"),
    *map(_policy, ("mesa", "wtacrs 0.3")),
    CheckedMethod("bf16, bfp 4", Method("", BF16, stash=POLICIES["bfp 4"]), "bf16 + snvint 4"),
    CheckedMethod("checkpoint", RECOMPUTED, _CHECKPOINT),
    CheckedMethod("checkpoint, bfp 4", replace(RECOMPUTED, stash=POLICIES["bfp 4"]), f"{_CHECKPOINT} + snvint 4"),
    replace(_policy("selective"), name="selective, frozen", frozen=True),
)
#: the methods of a model that is not trained by all. The large one takes a minute for each; fairseq scales queries in
#: place, which autograd forbids of what the functions of mesa and wtacrs put out
ONLY = {
    LARGE: ["fp32", "bfp 4"],
    "t5 with dropout": ["fp32", "bf16", "bf16 autocast", "dsq [8,4,8,8] all", "checkpoint"],
    FAIRSEQ: [method.name for method in METHODS if method.name not in ("mesa", "wtacrs 0.3")],
}


def held(name: str) -> dict[str, Any]:
    """Bytes that a model holds by each method; in a process that is counted."""
    torch.set_num_threads(1)
    results = {}
    for method in METHODS:
        if method.name in ONLY.get(name, [method.name]):
            made = checked_model(name)
            if method.frozen:
                _freeze_linears(made.model)
            attach(made.model, method.setup)
            autocast = torch.autocast("cpu", torch.bfloat16, enabled="autocast" in method.setup)
            results[method.name] = asdict(step_bytes(autocast(made.loss)))
    return results


def _freeze_linears(model: nn.Module) -> None:
    from transformers.pytorch_utils import Conv1D

    for module in model.modules():
        if isinstance(module, (nn.Linear, Conv1D)):
            module.requires_grad_(False)


def measurements(path: Path | None) -> dict[str, Any]:
    """Bytes of each model and method: a process for each model that ``path`` lacks."""
    known: dict[str, Any] = json.loads(path.read_text()) if path and path.exists() else {}
    known |= {name: figures("analysis.memory.prediction", "--held", name) for name in NAMES if name not in known}
    if path:
        path.write_text(json.dumps(known, indent=1))
    return known


def compare(name: str, held: dict[str, Any]) -> list[Record]:
    """A row for each method: bytes as measured and as predicted."""
    workload = checked_model(name).workload
    return [_record(name, method, workload, held[method.name]) for method in METHODS if method.name in held]


def _record(name: str, method: CheckedMethod, workload: Workload, held: dict[str, int]) -> Record:
    workload = workload.freezing(LINEARS) if method.frozen else workload
    workload = workload.converting_tied() if "tied" in method.setup else workload
    memory = peak_memory(workload, replace(method.predicted, accumulates=True))  # gradients are there before
    above = memory.peak - float(memory.totals[-1])
    return {
        **{"model": name, "method": method.name, "saved_MB": held["stash"] / MEGA},
        **{"predicted_MB": memory.saved / MEGA, "off": memory.saved / held["stash"] - 1},
        **{"peak_MB": held["peak"] / MEGA, "predicted_peak_MB": above / MEGA},
        **{"peak_off": above / held["peak"] - 1, "peak_at": memory.cause},
    }


def _summary(name: str, records: list[Record]) -> Record:
    """How far the predictions are off, in the median and at worst."""
    found: Record = {"model": name}
    for title, column in (("saved", "off"), ("peak", "peak_off")):
        errors = [abs(record[column]) for record in records]
        found |= {f"{title}: median": median(errors), f"{title}: worst": max(errors)}
    return found


def run(measured: Path | None) -> None:
    known = measurements(measured)
    records = [record for name in NAMES for record in compare(name, known[name])]
    shown = {"model": "", "method": "", "saved_MB": ".2f", "predicted_MB": ".2f", "off": "+.1%"}
    shown |= {"peak_MB": ".2f", "predicted_peak_MB": ".2f", "peak_off": "+.1%", "peak_at": ""}
    print(table(records, shown, markdown=True))
    summary = [_summary(name, [record for record in records if record["model"] == name]) for name in NAMES]
    summary.append(_summary("all", records))
    print("\n" + table(summary, dict.fromkeys(summary[0], ".1%") | {"model": ""}, markdown=True))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.memory.prediction", description=__doc__)
    parser.add_argument("--measured", type=Path, metavar="FILE", help="measurements to read, or to write if not there")
    parser.add_argument("--held", choices=NAMES, help=argparse.SUPPRESS)  # of the process that is counted
    arguments = parser.parse_args(argv)
    if arguments.held:
        print(json.dumps(held(arguments.held)))
        return 0
    return guarded(parser.prog, lambda: run(arguments.measured))


if __name__ == "__main__":
    sys.exit(main())
