"""Trainings that others published, as the cost model describes them.

analysis/results/published_runs.csv: 108 trainings of MPT (table "mpt": mosaicml/llm-foundry) and 55 of others (table
"others", second-hand). Those are predicted that have a "profile", dsq-cost's name of the device: data parallel, whole
models; no context parallelism, interleaved stages, 8-bit or 4-bit floats, which dsq-cost does not describe. Their
"loss" is what the loss saves of the logits: fp32; 16 bits (--fused-loss); or only a chunk (--chunked-loss). The rule
of exclusion and the seed that drew each "half" of MPT's were committed before four constants of the hardware files were
fitted to the one half (commit 42c1cfa6). `python -m analysis.published write` writes published.csv and published.png
beside the table.

58 more (table "commands") were written down on 2026-11-28, before dsq-cost was asked for any: each with the options of
`dsq-cost plan` (column "layout") and the method (column "precision") that describe it. Nothing was fitted to them;
--lora-dropout was added afterwards, as litgpt's configs have it.
"""

import csv
import hashlib
import json
import math
import re
import shlex
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from analysis import ROOT
from dsq import costmodel
from dsq.costmodel.cli.main import parser
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.model.memory import Memory, peak_memory
from dsq.costmodel.model.methods import AUTOCAST, BF16, USUAL, Method
from dsq.costmodel.model.operations import Operation, Pointwise, Workload
from dsq.costmodel.planning.plan import ASKED, NF4_BITS, MethodCost, compiled, reserved_bytes
from dsq.costmodel.planning.step import RANGES, kind_of, step_time
from dsq.costmodel.workloads.config_json import transformer_of
from dsq.costmodel.workloads.named import ADAPTED, AskedStep, load_shapes
from dsq.costmodel.workloads.shapes import Transformer
from dsq.costmodel.workloads.transformer import build

RUNS = ROOT / "analysis/results/published_runs.csv"
CsvRow = dict[str, str]


def published() -> list[CsvRow]:
    """Rows of the table of published trainings."""
    with RUNS.open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


#: sizes of GPT-2 as nanoGPT trains it; MPT's stand in the table
GPT2 = {"n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50304}
MPT_WORDS = 50368
#: a source whose RMS norms are one kernel, which keeps its x alone (norm_type "fused_rmsnorm" in its configs of 2024)
FUSED_NORMS = "torchtitan docs/performance.md"
#: rate of the first FlashAttention on an A100, of a product's: fitted to half of MPT's trainings, which had it. The
#: profiles of the A100 have the second one's
FIRST_FLASH = 0.37
#: bytes that a process takes of a GPU besides what PyTorch's allocator reserves
CONTEXT = 0.5e9


def described(row: CsvRow) -> tuple[Workload, Method]:
    """What each device computes, and how. LoRA has rank 8 in every linear layer, as torchtune's recipe."""
    length, batch, devices = (int(row[name]) for name in ("sequence", "micro_batch", "devices"))
    like_gpt2 = row["model"].lower().startswith(("mpt", "gpt-2"))
    shapes = _gpt2(row, length) if like_gpt2 else load_shapes(row["model"].split()[0])
    model = replace(shapes, sequences=batch, target_length=length)
    zero = 0 if devices == 1 or "DDP" in row["layout"] else 2 if row["layout"] == "SHARD_GRAD_OP" else 3
    again = row["recompute"] in ("full", "yes", "selective")
    selective, accumulates = row["recompute"] == "selective", int(row["accumulation"] or 1) > 1
    setup = AUTOCAST if zero == 3 and "QLoRA" not in row["model"] else BF16  # FSDP's mixed precision
    method = Method("bf16", setup, recompute=again, selective=selective, zero=zero, devices=devices)
    method = replace(method, accumulates=accumulates)
    if "in-backward" in row["layout"]:  # bitsandbytes' paged AdamW of 8 bits, over weights of 16
        method = replace(method, optimizer="adam-8bit-16bit", in_backward=True, offload=True)
    if "QLoRA" in row["model"]:
        method = replace(method, base_bits=NF4_BITS)
    workload = build(model).fusing_attention()
    workload = workload.adapting(8, ADAPTED) if "LoRA" in row["model"] else workload
    if row["source"].startswith(FUSED_NORMS):
        workload = replace(workload, operations=tuple(map(_fused_norm, workload.operations)))
    if fused := is_compiled(f"{row['layout']} {row['source']}"):
        passes = (op if op.kind.startswith("loss") else compiled(op) for op in workload.operations)  # column "loss"
        workload = replace(workload, operations=tuple(passes))
    return workload, replace(method, compiled=fused)


def _gpt2(row: CsvRow, length: int) -> Transformer:
    """MPT is GPT-2 with positions of its own, fused attention, the exact gelu and no dropout."""
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
    usual = {"model_type": "gpt2", "n_positions": length, "activation_function": "gelu"} | dropouts
    sizes = GPT2
    if row["d_model"]:
        width, heads, layers = (int(row[name]) for name in ("d_model", "heads", "layers"))
        sizes = {"n_embd": width, "n_head": heads, "n_layer": layers, "vocab_size": MPT_WORDS}
    return transformer_of(usual | sizes, row["model"])


def _fused_norm(op: Operation) -> Operation:
    return replace(op, kind="norm") if isinstance(op, Pointwise) and op.kind == "rms" else op


def _tokens_per_second(row: CsvRow) -> float:
    """The published throughput of a device, from whichever figure was published."""
    if row["tokens_per_second_per_device"]:
        return float(row["tokens_per_second_per_device"])
    return float(row["accumulation"]) * int(row["micro_batch"]) * int(row["sequence"]) / float(row["step_s"])


def memory_of(row: CsvRow, workload: Workload, method: Method) -> Memory:
    """The memory of one device."""
    losses = {"fp32": workload, "16 bits": workload.fusing_loss(), "chunked": workload.chunking_loss()}
    return peak_memory(losses[row["loss"]], method)


def shown(row: CsvRow, peak: float, reserved: float) -> float:
    """Bytes of what was measured: reserved; nvidia-smi's or the process's, with a context besides; else allocated."""
    return {"reserved": reserved, "nvidia-smi": reserved + CONTEXT, "process": reserved + CONTEXT}.get(
        row["measure"], peak
    )


def judged(row: CsvRow, as_shipped: bool = False) -> dict[str, Any]:
    """Predicted throughput over published, whether the training is told to fit, and predicted memory over published.

    as_shipped: MPT on A100 too at the profile's rate of attention, instead of that of the kernels that it ran.
    """
    (workload, method), hardware = described(row), load_hardware(row["profile"])
    if row["table"] == "mpt" and "A100" in hardware.name and not as_shipped:
        hardware = replace(hardware, attention=FIRST_FLASH)
    predicted, memory = (
        workload.tokens / step_time(workload, method, hardware).launched,
        memory_of(row, workload, method),
    )
    known = float(row["memory"] or 0) * 2**30  # bytes; 0: not published
    record = {"peak": memory.peak, "predicted": predicted, "ratio": predicted / _tokens_per_second(row)}
    held = shown(row, memory.peak, min(reserved_bytes(memory, method, hardware), hardware.memory_bytes))
    return record | {"fits": memory.peak <= hardware.memory_bytes, "of_peak": held / known if known else None}


# ---- trainings that the command line describes

BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "vocab_size": 30522}
BERT |= {"max_position_embeddings": 512}
VIT = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "num_labels": 1000}
PHI = {"model_type": "phi", "vocab_size": 51200, "max_position_embeddings": 2048, "hidden_act": "gelu"}
PYTHIA = {"model_type": "gpt_neox", "vocab_size": 50688, "max_position_embeddings": 4096}
LLAMA = {"model_type": "llama", "vocab_size": 32000, "max_position_embeddings": 4096}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
#: models of the table "commands" that dsq-cost has no name for: fields of their config.json, and SIZES
CONFIGS = {
    "BERT-base classifier": (BERT, 768, 12, 12, 3072),
    "BERT-large classifier": (BERT, 1024, 24, 16, 4096),
    "ViT-B/16 224": (VIT, 768, 12, 12, 3072),
    "ViT-B/16 384": (VIT | {"image_size": 384}, 768, 12, 12, 3072),
    "ViT-L/16 224": (VIT, 1024, 24, 16, 4096),
    "ViT-L/16 384": (VIT | {"image_size": 384}, 1024, 24, 16, 4096),
    "ViT-H/14 224": (VIT | {"patch_size": 14}, 1280, 32, 16, 5120),
    "phi-1.5": (PHI, 2048, 24, 32, 8192),
    "phi-2, one kernel of gelu": (PHI, 2560, 32, 32, 10240),
    "StableLM-alpha-3B": (PYTHIA, 4096, 16, 32, 16384),
    "Code Llama 34B": (LLAMA | {"num_key_value_heads": 8}, 8192, 48, 64, 22016),
}


def commanded(row: CsvRow, folder: Path) -> dict[str, Any]:
    """dsq-cost plan's figures of a training that was asked for by its options, as `judged` has them."""
    model, (device, _, network) = row["model"], row["hardware"].partition(", ")
    workload = model
    if model in CONFIGS:
        fields, *sizes = CONFIGS[model]
        workload = str(folder / f"{sizes} {fields.get('image_size')}.json")
        Path(workload).write_text(json.dumps(fields | dict(zip(SIZES, sizes, strict=True))))
    words = ["plan", workload, "--devices", row["devices"]]
    words += ["--sequences", row["micro_batch"], "--accumulate", row["accumulation"]]
    if not model.startswith("ViT"):
        words += ["--tokens", row["sequence"]]
    if network:  # "400 Gbit/s a node"
        profile, gigabytes = device, int(network.split()[0]) / 8
        device = str(folder / f"{profile} {gigabytes}.toml")
        Path(device).write_text(f'like = "{profile}"\nname = "{profile}"\nnetwork = {{ gb_per_s = {gigabytes} }}\n')
    fused = ["--compiled"] * is_compiled(f"{row['layout']} {row['source']}")
    words += ["--hardware", device, *row["layout"].split(), *fused]
    cost, _, speed = as_typed(words, row["precision"])
    published, known = (float(row[name] or 0) for name in ("tokens_per_second_per_device", "memory"))
    found: dict[str, Any] = {"fits": cost.fits, "peak": cost.memory.peak, "predicted": speed}
    found["ratio"] = found["predicted"] / published if published else None
    held = shown(row, cost.memory.peak, cost.reserved)
    return found | {"of_peak": held / (known * 2**30) if known else None}


# ---- kinds of training, each with its range

#: words of a row that say that its passes were fused
KINDS = ("eager", "several nodes", "GDDR", "compiled")
_COMPILED = ("compile", "nanoGPT", "TinyLlama README", "Optimization flags")


@dataclass(frozen=True)
class Residual:
    """A published training, and its published time over the predicted one."""

    name: str
    kind: str
    program: str
    time: float

    @property
    def half(self) -> str:
        """ "fitted" or "judging", as a hash of the row draws it."""
        return "fitted" if hashlib.sha256(self.name.encode()).digest()[0] % 2 else "judging"


def residuals(more: Path | None = None, kinds: Sequence[str] = ()) -> list[Residual]:
    """Every row with a published speed, of these kinds (none: of all). more: a table of further commands."""
    listed = []
    with tempfile.TemporaryDirectory() as folder:
        for row in included():
            name = " ".join(row[column] for column in list(row)[:14])
            if kinds and kind_of_row(row) not in kinds:
                continue
            if ratio := result(row, Path(folder))["ratio"]:
                listed.append(Residual(name, kind_of_row(row), row["table"], ratio))
    for row in _further(more):
        words = shlex.split(re.sub("--optimi[sz]er", "--optimizer", row["command"]))
        _, kind, speed = as_typed([*words[1:], *["--compiled"] * is_compiled(row["note"])], row["method"])
        if not kinds or kind in kinds:
            listed.append(Residual(f"{row['group']} {row['what']}", kind, "more", speed / float(row["published"])))
    for row in judged_once():
        if row["kind"] in (kinds or KINDS):
            name = f"{row['source']} {row['training']}"
            listed.append(Residual(name, row["kind"], "once", float(row["ratio"])))
    return listed


def as_typed(words: Sequence[str], method: str) -> tuple[MethodCost, str, float]:
    """A method's row of the plan that the words of a command ask for, the kind of the training, and the tokens per
    second of a device."""
    given = vars(parser().parse_args(words))
    names = (*vars(AskedStep()), *ASKED, "hardware", "qlora", "gpus", "base_bits")
    options = {name: given[name] for name in names if given.get(name) is not None}
    options |= {"workload": given["words"][0], "methods": tuple(usual for usual in USUAL if usual.name == method)}
    plan = costmodel.plan(**options)
    row = next(row for row in plan.rows if row.method.name == method)
    shard = plan.question.shard
    speed = row.tokens_per_second / (row.method.devices * shard.devices)
    return row, kind_of(row.method, plan.question.hardware, shard.devices), speed


def judged_once() -> list[CsvRow]:
    """Rows of analysis/results/published_once.csv: figures that were gathered on 2026-11-29, each with its command,
    before dsq-cost was asked. at_first: predicted over published then; ratio: now; doubt: why a row judges little."""
    with RUNS.with_name("published_once.csv").open(newline="", encoding="utf-8") as lines:
        return list(csv.DictReader(lines))


def judged_now(row: CsvRow, folder: Path) -> dict[str, str]:
    """Such a row with the figures of now: predicted over published, and of times whether the range holds it."""
    words = shlex.split(f"plan {row['command']}")
    if row["config"]:
        config = folder / Path(words[1]).name
        config.write_text(row["config"])
        words[1] = str(config)
    cost, kind, speed = as_typed(words, row["method"])
    if row["kind"] == "memory":
        held = shown(row, cost.memory.peak, cost.reserved)
        figure, kind = held / (2**30 if row["unit"] == "GiB" else 1e9), "memory"
    else:  # of a translation the target's tokens are published
        figure = speed / (2 if row["unit"].startswith("target") else 1)
    ratio = figure / float(row["published"])
    within = "" if kind == "memory" else _yes(cost.step.low <= ratio <= cost.step.high)
    return row | {"kind": kind, "ratio": f"{ratio:.4g}", "within": within, "fits": _yes(cost.fits)}


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def included() -> list[CsvRow]:
    """Rows that dsq-cost describes."""
    return [row for row in published() if row["table"] == "commands" or row["profile"]]


def kind_of_row(row: CsvRow) -> str:
    fused = is_compiled(f"{row['layout']} {row['source']}")
    return _kind(row["profile"] or row["hardware"].partition(",")[0], int(row["devices"]), fused)


def result(row: CsvRow, folder: Path) -> dict[str, Any]:
    return commanded(row, folder) if row["table"] == "commands" else judged(row)


def write_results() -> None:
    """Write analysis/results/published.csv and published.png, and published_once.csv anew: every row."""
    columns = ("model", "hardware", "devices", "layout", "recompute", "sequence", "micro_batch")
    records = []
    with tempfile.TemporaryDirectory() as folder:
        once: list[dict[str, Any]] = [dict(judged_now(row, Path(folder))) for row in judged_once()]
        for row in included():
            found = result(row, Path(folder))
            record: dict[str, Any] = {"half": row["half"] or row["table"], "kind": kind_of_row(row)}
            record |= {name: row[name] for name in columns} | {"predicted": found["predicted"], "ratio": found["ratio"]}
            record["published"] = found["predicted"] / found["ratio"] if found["ratio"] else None
            record |= {"peak_GB": found["peak"] / 1e9, "fits": _yes(found["fits"]), "measure": row["measure"]}
            records.append(record | {"of_peak": found["of_peak"]})
    for name, listed in (("published.csv", records), ("published_once.csv", once)):
        with RUNS.with_name(name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(listed[0]), lineterminator="\n")
            writer.writeheader()
            for record in listed:
                rounded = {name: f"{it:.4g}" for name, it in record.items() if isinstance(it, float)}
                writer.writerow(record | rounded)
    draw(records, RUNS.with_name("published.png"))


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Predicted over published throughput of each training, by its kind; MPT's small."""
    from dsq.costmodel.cli.pictures.figure import BLACK, COLOURS, new_figure

    figure, axes = new_figure(size=(8, 4.2))
    axes.axhspan(0.8, 1.25, color="#EEEEEE", zorder=0)
    axes.axhline(1, color=BLACK, linewidth=0.8)
    for kind, color in zip(KINDS, COLOURS, strict=False):
        ours = [record for record in records if record["kind"] == kind and record["ratio"]]
        sizes = [14 if record["model"].startswith("MPT") else 42 for record in ours]
        points = [record["published"] for record in ours], [record["ratio"] for record in ours]
        label = "{}: {:.2f} to {:.2f} is printed".format(kind, *RANGES[kind])
        axes.scatter(*points, s=sizes, color=color, label=label, alpha=0.8, edgecolors="white", linewidths=0.6)
    axes.set(xscale="log", yscale="log", ylim=(0.5, 2), yticks=[0.5, 0.8, 1, 1.25, 2])
    axes.set_yticks([], minor=True)
    axes.set_yticklabels(["0.5", "0.8", "1", "1.25", "2"])
    axes.set_xlabel("published tokens per second and device (small: MPT)")
    axes.set_ylabel("predicted / published")
    axes.legend(loc="upper center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


def _further(path: Path | None) -> list[CsvRow]:
    if path is None:
        return []
    with path.open(newline="", encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if row["unit"].startswith("tok") and "cfg/" not in row["command"]]


def is_compiled(text: str) -> bool:
    return any(word in text for word in _COMPILED)


def _kind(hardware: str, devices: int, fused: bool) -> str:
    return kind_of(Method("", BF16, devices=devices, compiled=fused), load_hardware(hardware))


def range_of(listed: Sequence[Residual]) -> tuple[float, float]:
    """The times that eight of ten further ones are expected to lie between (Weibull's plotting positions), rounded
    outwards to hundredths. MPT's many rows weigh as much together as those of all other programs."""
    times = sorted(listed, key=lambda one: one.time)
    counts = Counter(one.program == "mpt" for one in times)
    weights = np.array([1 / counts[one.program == "mpt"] for one in times])
    places = np.cumsum(weights) / (weights.sum() + weights.mean())
    low, high = np.interp([0.1, 0.9], places, [one.time for one in times])
    return math.floor(100 * low) / 100, math.ceil(100 * high) / 100


def main() -> None:
    """Print the range of each kind by its fitted half, and how many times of either half lie within. "write": write all
    rows and their picture instead."""
    if sys.argv[1:] == ["write"]:
        return write_results()
    every = residuals(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
    for kind in dict.fromkeys(residual.kind for residual in every):
        ours = [residual for residual in every if residual.kind == kind]
        low, high = range_of([one for one in ours if one.half == "fitted"])
        words = [f"{kind}: low {low}, high {high}"]
        for half in ("fitted", "judging"):
            for name, mpt in (("MPT", True), ("others", False)):
                times = [one.time for one in ours if one.half == half and (one.program == "mpt") is mpt]
                if times:
                    within, off = sum(low <= time <= high for time in times), median(abs(time - 1) for time in times)
                    words.append(f"{half} {name} {within} of {len(times)}, {off:.1%} off")
        print("; ".join(words))


if __name__ == "__main__":
    main()
