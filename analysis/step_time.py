"""Step times as dsq-cost predicts them and as running models take them, on the machine that a hardware file measured.

    dsq-cost calibrate mine.toml
    python -m analysis.step_time mine.toml [--markdown]

A step is forward, backward and a fused Adam update, of models of Hugging Face with eager attention, without dropout and
key-value cache, with the threads that the file was measured with. The converted models stay in float32 around their
layers, so that their passes are predicted with --container 32.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

import dsq
from analysis.models import from_transformers
from analysis.small_transformers import workload_of
from analysis.timing import Call, in_turns, keep_freed_memory
from costmodel.hardware.hardware import Hardware, load_hardware
from costmodel.model.estimate import evaluate
from costmodel.model.quantisation import DSQ, Setup
from dsq.command import OneLineParser, guarded, table
from dsq.formats import Identity
from dsq.precision import Precision

LENGTH, WORDS = 128, 4000
#: so many that some meet no fresh page: a heap that still grows costs a step up to a fifth
WARM, ROUNDS = 3, 8


@dataclass(frozen=True)
class SmallModel:
    """A small model of transformers: the name of its class, and its sizes."""

    head: str
    sequences: int
    fields: dict[str, Any]


def _alike(width: int, layers: int, heads: int, ffn: int) -> dict[str, Any]:
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ffn,
    }


MODELS = {
    "gpt2": SmallModel(
        "GPT2LMHeadModel",
        4,
        {"n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": LENGTH, "activation_function": "gelu"},
    ),
    "llama": SmallModel("LlamaForCausalLM", 4, _alike(512, 2, 8, 1408)),
    "bert": SmallModel("BertForMaskedLM", 8, _alike(256, 4, 4, 1024)),
    "opt": SmallModel(
        "OPTForCausalLM",
        4,
        {
            "hidden_size": 384,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "ffn_dim": 1536,
            "word_embed_proj_dim": 384,
            "activation_function": "relu",
        },
    ),
    "gpt_neox": SmallModel("GPTNeoXForCausalLM", 2, _alike(768, 2, 12, 3072)),
    "qwen2": SmallModel("Qwen2ForCausalLM", 8, _alike(256, 6, 4, 768) | {"num_key_value_heads": 2}),
}
LEVELS = (Precision(4, 4, 4, 16), Precision(16, 4, 4, 16))
SETUPS = {
    "fp32": Setup(Identity(), Precision(32, 32, 32, 32)),
    "bf16 autocast": Setup(Identity(), Precision(16, 16, 16, 16)),
    **{f"dsq {level}": Setup(DSQ, level, container=32) for level in LEVELS},
}


def main(argv: list[str] | None = None) -> int:
    parser = OneLineParser(prog="python -m analysis.step_time", description=__doc__)
    parser.add_argument("hardware", help="the file that dsq-cost calibrate wrote on this machine")
    parser.add_argument("--model", action="append", choices=MODELS, help="only this one; may be repeated")
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    options = parser.parse_args(argv)
    return guarded(parser.prog, lambda: run(options))


def run(options: argparse.Namespace) -> None:
    hardware = load_hardware(options.hardware)
    if not hardware.measured:
        raise ValueError(f"hardware {options.hardware} is not measured: dsq-cost calibrate writes one that is")
    keep_freed_memory()
    records = [record for name in options.model or MODELS for record in compare(name, hardware)]
    shown = {"model": "", "setup": "", "measured_ms": ".1f", "predicted_ms": ".1f", "off": "+.1%"}
    print(table(records, shown, markdown=options.markdown))
    errors = sorted(abs(record["off"]) for record in records)
    print(f"\noff: median {median(errors):.1%}, worst {errors[-1]:.1%}; {hardware.name}, {hardware.measured}")


def compare(name: str, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """A row for each setup: the step as measured, all setups in turns, and as predicted."""
    lengths = {"source_length": LENGTH} if name == "bert" else {"target_length": LENGTH}
    workload = workload_of(build(name), MODELS[name].sequences, **lengths)
    seconds = in_turns({setup: step(name, setup) for setup in SETUPS}, ROUNDS, repeats=1, warm=WARM)
    for label, setup in SETUPS.items():
        measured, predicted = min(seconds[label]), float(evaluate(workload, setup, hardware).total.seconds)
        yield {
            "model": name,
            "setup": label,
            "measured_ms": 1e3 * measured,
            "predicted_ms": 1e3 * predicted,
            "off": predicted / measured - 1,
        }


def build(name: str) -> Any:
    torch.manual_seed(0)
    return from_transformers(MODELS[name].head, "eager", vocab_size=WORDS, **MODELS[name].fields)


def step(name: str, setup: str) -> Call:
    """One training step of the model."""
    model = build(name)
    if setup.startswith("dsq"):
        dsq.convert(model, dsq.DSQConfig(levels=setup.removeprefix("dsq "), tied=True))  # type: ignore[arg-type]
    ids = torch.randint(WORDS, (MODELS[name].sequences, LENGTH))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.startswith("bf16")):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimiser.step()

    return run


if __name__ == "__main__":
    sys.exit(main())
