"""Trainings that others published, against dsq-cost's prediction of them.

    python -m analysis.published fit      the constants that bring half of MPT's trainings nearest to their prediction
    python -m analysis.published judge    every prediction beside what was published, the other half first; a picture

analysis/results/published_runs.csv: 108 trainings of MPT (table "mpt": mosaicml/llm-foundry) and 47 of others (table
"others", second-hand). The rule of exclusion and the seed below were committed before anything was fitted.
"""

import argparse
import csv
import random
import re
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
import numpy.typing as npt

from costmodel.hardware.hardware import Hardware, load_hardware
from costmodel.model.memory import Method, peak_memory
from costmodel.model.operations import Workload
from costmodel.model.quantisation import BF16
from costmodel.planning.step import step_time
from costmodel.workloads.families import transformer_of
from costmodel.workloads.transformer import build
from dsq.command.parser import OneLineParser, guarded
from dsq.command.table import table

RUNS = Path(__file__).with_name("results") / "published_runs.csv"
#: draws the halves of the table "mpt": one is fitted, the other judges
SEED = 20261125
#: left out, because dsq-cost does not describe it: context parallelism, interleaved stages, 8-bit and 4-bit floats
EXCLUDED = re.compile(r"\bCP ?([2-9]|\d\d)|interleav|\bVP\d|fp8|fp4", re.IGNORECASE)

Row = dict[str, str]


def included() -> list[Row]:
    """Rows of the table of published trainings that the rule of exclusion leaves, in the table's order."""
    with RUNS.open(newline="", encoding="utf-8") as lines:
        return [row for row in csv.DictReader(lines) if not EXCLUDED.search(f"{row['layout']} {row['precision']}")]


def halves() -> tuple[list[Row], list[Row]]:
    """The rows of MPT that are fitted, and those that judge, each in the table's order."""
    rows = [row for row in included() if row["table"] == "mpt"]
    fitted = set(random.Random(SEED).sample(range(len(rows)), len(rows) // 2))
    return [row for at, row in enumerate(rows) if at in fitted], [
        row for at, row in enumerate(rows) if at not in fitted
    ]


#: hardware of the table -> profile of dsq-cost
HARDWARE = {"a100_40gb": "a100-40gb", "a100_80gb": "a100-80gb", "h100_80gb": "h100"}
MPT_WORDS = 50368


@dataclass(frozen=True)
class Run:
    """One published training: what each device computes, how, on what, and the tokens a second of one device."""

    row: Row
    workload: Workload
    method: Method
    hardware: str
    published: float

    def predicted(self, hardware: Hardware) -> float:
        """Tokens a second of one device."""
        return self.workload.tokens / step_time(self.workload, self.method, hardware).seconds


def mpt_run(row: Row) -> Run:
    """A row of the table "mpt": MPT is GPT-2 with learned positions, fused attention and no dropout."""
    length = int(row["sequence"])
    config = {
        "model_type": "gpt2",
        "n_embd": int(row["d_model"]),
        "n_head": int(row["heads"]),
        "n_layer": int(row["layers"]),
        "n_positions": length,
        "vocab_size": MPT_WORDS,
        "activation_function": "gelu",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0),
    }
    model = replace(transformer_of(config, row["model"]), sequences=int(row["micro_batch"]), target_length=length)
    zero = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}[row["layout"]]
    method = Method("bf16", BF16, recompute=row["recompute"] == "full", zero=zero, devices=int(row["devices"]))
    published = float(row["tokens_per_second_per_device"])
    return Run(row, build(model).fusing_attention(), method, HARDWARE[row["hardware"]], published)


@cache
def _profile(name: str) -> Hardware:
    return load_hardware(name)


# -- fit

#: a constant's name -> the hardware with it at another value
Change = Callable[[Hardware, float], Hardware]
CONSTANTS: dict[str, Change] = {
    "memory": lambda hardware, value: replace(hardware, efficiency=replace(hardware.efficiency, memory=value)),
    "exposed": lambda hardware, value: replace(hardware, efficiency=replace(hardware.efficiency, exposed=value)),
    "attention, A100": lambda hardware, value: replace(hardware, attention=value) if "A100" in hardware.name else hardware,
    "attention, H100": lambda hardware, value: replace(hardware, attention=value) if "H100" in hardware.name else hardware,
}
#: ratio of predicted to published beyond which a row counts less (a pseudo-Huber loss)
OUTLIER = 0.15
Vector = npt.NDArray[np.float64]


def fit(runs: list[Run]) -> dict[str, float]:
    """The constants that minimise the logarithms of predicted over published throughput (Levenberg, Marquardt)."""

    def losses(logs: Vector) -> Vector:
        errors = []
        for run in runs:
            hardware = _profile(run.hardware)
            for change, value in zip(CONSTANTS.values(), np.exp(logs), strict=True):
                hardware = change(hardware, float(value))
            errors.append(np.log(run.predicted(hardware) / run.published))
        found = np.array(errors)
        return np.sign(found) * OUTLIER * np.sqrt(2 * (np.hypot(1, found / OUTLIER) - 1))

    logs, damping, step = np.log(np.full(len(CONSTANTS), 0.4)), 1e-2, 1e-3
    now = losses(logs)
    for _ in range(15):
        slopes = np.array([(losses(logs + step * one) - now) / step for one in np.eye(len(logs))]).T
        move = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(logs)), -slopes.T @ now)
        new = losses(logs + move)
        better = new @ new < now @ now
        damping *= 0.3 if better else 10
        if better:
            settled = now @ now - new @ new < 1e-6
            logs, now = logs + move, new
            if settled:
                break
    return dict(zip(CONSTANTS, np.exp(logs).tolist(), strict=True))
