"""Trainings that others published, against dsq-cost's prediction of them.

    python -m analysis.published judge    every prediction beside what was published; a picture

analysis/results/published_runs.csv: 108 trainings of MPT (table "mpt": mosaicml/llm-foundry) and 55 of others (table
"others", second-hand). The rule of exclusion and the seed below were committed before `analysis.published fit` (commit
42c1cfa6) fitted four constants of the hardware files to half of MPT's trainings.
"""

import csv
import random
import re
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from analysis import ROOT
from analysis.figures import BLUE, GREY, ORANGE, look, save
from costmodel.hardware.hardware import Hardware, load_hardware
from costmodel.model.memory import peak_memory
from costmodel.model.methods import BF16, Method
from costmodel.model.operations import Operation, Pointwise, Workload
from costmodel.planning.plan import NF4_BITS
from costmodel.planning.step import step_time
from costmodel.workloads.config_json import transformer_of
from costmodel.workloads.named import ADAPTED
from costmodel.workloads.transformer import build
from dsq.command import OneLineParser, as_csv, guarded, table, write_text

RUNS = ROOT / "analysis/results/published_runs.csv"
RESULTS, PICTURE = (RUNS.with_name(f"published.{kind}") for kind in ("csv", "png"))
#: draws the halves of the table "mpt": one is fitted, the other judges
SEED = 20261125
#: left out, because dsq-cost does not describe it: context parallelism, interleaved stages, 8-bit and 4-bit floats
EXCLUDED = re.compile(r"\bCP ?([2-9]|\d\d)|interleav|\bVP\d|fp8|fp4", re.IGNORECASE)

CsvRow = dict[str, str]


def included() -> list[CsvRow]:
    """Rows of the table of published trainings that the rule of exclusion leaves, in the table's order."""
    with RUNS.open(newline="", encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if not EXCLUDED.search(f"{row['layout']} {row['precision']}")]


def halves() -> tuple[list[CsvRow], list[CsvRow]]:
    """The rows of MPT that are fitted, and those that judge, each in the table's order."""
    rows = [row for row in included() if row["table"] == "mpt"]
    fitted = set(random.Random(SEED).sample(range(len(rows)), len(rows) // 2))
    parts = ([row for at, row in enumerate(rows) if (at in fitted) == half] for half in (True, False))
    return next(parts), next(parts)


#: start of a device's name in the table -> profile of dsq-cost, and the GB of its memory that a process may take
DEVICES = {
    "a100_40gb": "a100-40gb",
    "a100_80gb": "a100-80gb",
    "8xA100": "a100-40gb",
    "h100_80gb": "h100",
    "A100-80": "a100-80gb",
    "H100-80": "h100",
    "H100 96GB": "h100-96gb",
    "Blackwell": "b200",
    "RTX 4090": "rtx-4090",
}
MPT_WORDS = 50368
_LLAMA = {"model_type": "llama", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8}
_LLAMA_70 = _LLAMA | {"hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672}
#: start of a model's name in the table "others" -> its config.json
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama2-13B": {"model_type": "llama", "hidden_size": 5120, "num_attention_heads": 40, "num_hidden_layers": 40}
    | {"intermediate_size": 13824, "vocab_size": 32000},
    "Llama2-70B": _LLAMA_70 | {"num_hidden_layers": 80, "vocab_size": 32000},
    "Llama3-70B": _LLAMA_70 | {"num_hidden_layers": 80, "vocab_size": 128256},
    "Llama3": _LLAMA | {"num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 128256},
    "Qwen3-8B": _LLAMA
    | {"model_type": "qwen3", "num_hidden_layers": 36, "intermediate_size": 12288}
    | {"vocab_size": 151936, "head_dim": 128},
    "GPT-2": {"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12, "vocab_size": 50304},
}
#: models of the table "others" that are predicted: data parallel, whole models
OTHERS = re.compile(r"^(MPT-|Llama3.*8B( |$)|Llama2-|Llama3-70B$|Qwen3-8B$|GPT-2 )")
#: start of a row's source -> what its loss keeps of the logits: 16 bits and their gradient in their place, or nothing
#: but a chunk. The others' losses are in fp32
LOSSES = {"mosaicml": "16 bits", "llm-foundry": "16 bits", "torchtitan components": "chunked", "torchtune": "chunked"}
#: a source whose RMS norms are one kernel, which keeps its x alone (norm_type "fused_rmsnorm" in its configs of 2024)
FUSED_NORMS = "torchtitan docs/performance.md"


@dataclass(frozen=True)
class PublishedRun:
    """One published training: what each device computes, how, on what, and the tokens a second of one device."""

    row: CsvRow
    half: str  #: "fitted", "judging" or "others"
    workload: Workload
    method: Method
    hardware: str
    published: float

    def predicted(self, hardware: Hardware) -> float:
        """Tokens a second of one device."""
        return self.workload.tokens / step_time(self.workload, self.method, hardware).seconds

    @property
    def peak(self) -> float:
        """Bytes of one device."""
        loss = next((found for source, found in LOSSES.items() if self.row["source"].startswith(source)), "fp32")
        if loss == "fp32":
            return peak_memory(self.workload, self.method).peak
        memory = peak_memory(self.workload.chunking_loss(), self.method)
        if loss == "chunked":
            return memory.peak
        head = next(op for op in self.workload.gemms if op.name == "output_projection")
        at = memory.operations.index(head.name)  # the logits are there from its forward to its backward
        there = memory.totals[at : 2 * len(memory.operations) - at].max() + 2 * head.M * head.N
        return max(memory.peak, float(there))


def runs() -> list[PublishedRun]:
    """Every published training that is predicted."""
    fitted, judging = halves()
    sizes = {row["model"].lower(): row for row in fitted + judging}
    found = [_run(row, "fitted" if row in fitted else "judging") for row in fitted + judging]
    for row in included():
        whole = not re.search(r"TP|PP", row["layout"]) and row["micro_batch"] and row["sequence"].isdigit()
        if row["table"] == "others" and OTHERS.search(row["model"]) and whole:
            known = sizes.get(row["model"].lower(), {})
            sized = {name: known[name] for name in ("d_model", "heads", "layers") if known}
            found.append(_run(row | sized, "others"))
    return found


def _run(row: CsvRow, half: str) -> PublishedRun:
    """MPT is GPT-2 with positions of its own, fused attention, the exact gelu and no dropout. LoRA has rank 8 in every
    linear layer, as torchtune's recipe."""
    length, batch, devices = (int(row[name]) for name in ("sequence", "micro_batch", "devices"))
    if row["d_model"]:
        sizes = {"n_embd": "d_model", "n_head": "heads", "n_layer": "layers"}
        config = {"model_type": "gpt2", "vocab_size": MPT_WORDS} | {
            field: int(row[column]) for field, column in sizes.items()
        }
    else:
        config = next(found for name, found in CONFIGS.items() if row["model"].startswith(name))
    if config["model_type"] == "gpt2":
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0)
        config = config | dropouts | {"n_positions": length, "activation_function": "gelu"}
    model = replace(transformer_of(config, row["model"]), sequences=batch, target_length=length)
    zero = 0 if devices == 1 or "DDP" in row["layout"] else 2 if row["layout"] == "SHARD_GRAD_OP" else 3
    again = row["recompute"] in ("full", "yes", "selective")
    method = Method(
        "bf16", BF16, recompute=again, selective=row["recompute"] == "selective", zero=zero, devices=devices
    )
    if "in-backward" in row["layout"]:  # bitsandbytes' paged AdamW of 8 bits, over weights of 16
        method = replace(method, optimiser="adam-8bit-16bit", in_backward=True, offload=True)
    if "QLoRA" in row["model"]:
        method = replace(method, base_bits=NF4_BITS)
    hardware = next(found for name, found in DEVICES.items() if row["hardware"].startswith(name))
    workload = build(model).fusing_attention()
    workload = workload.adapting(8, ADAPTED) if "LoRA" in row["model"] else workload
    if row["source"].startswith(FUSED_NORMS):
        workload = replace(workload, operations=tuple(map(_fused_norm, workload.operations)))
    return PublishedRun(row, half, workload, method, hardware, _tokens_per_second(row))


def _fused_norm(op: Operation) -> Operation:
    return replace(op, kind="norm") if isinstance(op, Pointwise) and op.kind == "rms" else op


def _tokens_per_second(row: CsvRow) -> float:
    """The published throughput of a device, from whichever figure was published."""
    if row["tokens_per_second_per_device"]:
        return float(row["tokens_per_second_per_device"])
    return float(row["accumulation"]) * int(row["micro_batch"]) * int(row["sequence"]) / float(row["step_s"])


@cache
def _profile(name: str) -> Hardware:
    return load_hardware(name)


#: how the trainings are drawn: MPT's that were not fitted, the others', and those that were fitted
HALVES = {"judging": (BLUE, "o"), "others": (ORANGE, "s"), "fitted": (GREY, "x")}


def judged(run: PublishedRun) -> dict[str, Any]:
    """A row of the results: what was published, and what is predicted."""
    hardware = _profile(run.hardware)
    predicted, memory = run.predicted(hardware), run.peak
    fields = ("model", "hardware", "devices", "layout", "recompute", "sequence", "micro_batch")
    record: dict[str, Any] = {"half": run.half} | {name: run.row[name] for name in fields}
    record |= {"published": run.published, "predicted": predicted, "ratio": predicted / run.published}
    record |= {"peak_GB": memory / 1e9, "fits": "yes" if memory <= hardware.memory_bytes else "no"}
    known = float(run.row["memory"] or 0) * 2**30  # bytes that the allocator reserved; 0: not published
    return record | {"published_GB": known / 1e9 or None, "of_peak": memory / known if known else None}


def summary(records: list[dict[str, Any]]) -> dict[str, Any]:
    """How far off the predictions of throughput are, as ratios to what was published, and those of memory."""
    ratios = sorted(record["ratio"] for record in records)
    off = sorted(abs(ratio - 1) for ratio in ratios)
    shares = {f"within {bound:.0%}": sum(one <= bound for one in off) / len(off) for bound in (0.15, 0.25)}
    low, high = (float(np.quantile(ratios, share)) for share in (0.1, 0.9))
    ends = {"least": ratios[0], "a tenth below": low, "a tenth above": high, "most": ratios[-1]}
    fitting = sum(record["fits"] == "no" for record in records)
    peaks = [abs(record["of_peak"] - 1) for record in records if record["of_peak"]]
    memory = {"told not to fit": fitting, "peaks": len(peaks), "peaks off": median(peaks) if peaks else None}
    return {"trainings": len(ratios), "median off": median(off)} | shares | ends | memory


def draw(records: list[dict[str, Any]], path: Path) -> None:
    """Predicted against published throughput, and their ratio; the five worst are numbered."""
    with look():
        figure, (both, ratio) = plt.subplots(2, 1, figsize=(6.4, 6.8), sharex=True, height_ratios=(3, 2))
        ends, ones = np.array([200.0, 250_000.0]), np.ones(2)
        for axes, middle in ((both, ends), (ratio, ones)):
            axes.fill_between(ends, middle / 1.25, middle * 1.25, color=GREY, alpha=0.15, lw=0, label="within 25 %")
            axes.plot(ends, middle, color=GREY, lw=0.8)
        for half, (colour, marker) in HALVES.items():
            mine = [record for record in records if record["half"] == half]
            style = {"s": 18, "color": colour, "marker": marker, "alpha": 0.8, "label": half}
            published = [record["published"] for record in mine]
            both.scatter(published, [record["predicted"] for record in mine], **style)
            ratio.scatter(published, [record["ratio"] for record in mine], **style)
        for number, record in enumerate(worst(records)[:5], start=1):
            place = (record["published"], record["ratio"])
            ratio.annotate(str(number), place, xytext=(4, 4), textcoords="offset points", fontsize=8)
        both.set(xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel="predicted tokens a second of a device")
        ratio.set(
            yscale="log", ylim=(0.5, 2), ylabel="predicted / published", xlabel="published tokens a second of a device"
        )
        ratio.set_yticks([0.5, 0.8, 1, 1.25, 2], ["0.5", "0.8", "1", "1.25", "2"])
        ratio.minorticks_off()
        both.legend()
        save(figure, path)


def worst(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The records, the farthest from what was published first."""
    return sorted(records, key=lambda record: -abs(float(np.log(record["ratio"]))))


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.published", description=__doc__)
    parser.add_argument("task", choices=("judge",))
    parser.parse_args(argv)
    return guarded(parser.prog, judge)


def judge() -> None:
    """Write the results and the picture, and print how far off the predictions are."""
    records = [judged(one) for one in runs()]
    write_text(RESULTS, as_csv(records, ".4g"))
    draw(records, PICTURE)
    shown = {"half": "", "trainings": "", "median off": ".1%", "within 15%": ".0%", "within 25%": ".0%"}
    shown |= dict.fromkeys(("least", "a tenth below", "a tenth above", "most"), ".2f") | {"told not to fit": ""}
    shown |= {"peaks": "", "peaks off": ".1%"}
    summaries = [{"half": kind} | summary([one for one in records if one["half"] == kind]) for kind in HALVES]
    print(table(summaries, shown, markdown=True))
    columns = dict.fromkeys(list(records[0])[:8], "") | {"published": ",.0f", "predicted": ",.0f", "ratio": ".2f"}
    print("\nworst:\n" + table(worst(records)[:12], columns, markdown=True))


if __name__ == "__main__":
    sys.exit(main())
