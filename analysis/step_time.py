"""Step times as dsq-cost predicts them and as running models take them, on the machine that a hardware file measured.

    dsq-cost calibrate mine.toml
    python -m analysis.step_time mine.toml

A step is forward, backward and a fused Adam update, of models of Hugging Face with eager attention, without dropout and
key-value cache, with the threads that the file was measured with. The converted models stay in float32 around their
layers, so that their passes are predicted with --container 32.
"""

import sys
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

import dsq
from analysis.memory import workload_of
from analysis.models import transformer
from analysis.timing import Call, in_turns, keep_freed_memory
from costmodel.hardware.hardware import Hardware, load_hardware
from costmodel.model.methods import DSQ, Setup
from costmodel.model.roofline import evaluate
from dsq.command import OneLineParser, guarded, table
from dsq.formats import Identity
from dsq.precision import Precision

LENGTH, WORDS = 128, 4000
#: so many that some meet no fresh page: a heap that still grows costs a step up to a fifth
WARM, ROUNDS = 3, 8


#: name -> width, blocks, heads, sequences; and fields of its configuration that are not the usual ones
MODELS: dict[str, tuple[tuple[int, int, int, int], dict[str, Any]]] = {
    "gpt2": ((256, 4, 4, 4), {"n_positions": LENGTH, "activation_function": "gelu"}),
    "llama": ((512, 2, 8, 4), {"intermediate_size": 1408}),
    "bert": ((256, 4, 4, 8), {}),
    "opt": ((384, 3, 6, 4), {}),
    "gpt_neox": ((768, 2, 12, 2), {}),
    "qwen2": ((256, 6, 4, 8), {"intermediate_size": 768}),
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
    given = parser.parse_args(argv)
    return guarded(parser.prog, lambda: run(given.hardware))


def run(file: str) -> None:
    hardware = load_hardware(file)
    if not hardware.measured:
        raise ValueError(f"hardware {file} is not measured: dsq-cost calibrate writes one that is")
    keep_freed_memory()
    records = [record for name in MODELS for record in compare(name, hardware)]
    shown = {"model": "", "setup": "", "measured_ms": ".1f", "predicted_ms": ".1f", "off": "+.1%"}
    print(table(records, shown, markdown=True))
    errors = sorted(abs(record["off"]) for record in records)
    print(f"\noff: median {median(errors):.1%}, worst {errors[-1]:.1%}; {hardware.name}, {hardware.measured}")


def compare(name: str, hardware: Hardware) -> Iterator[dict[str, Any]]:
    """A row for each setup: the step as measured, all setups in turns, and as predicted."""
    model, inputs = _made(name)
    lengths = {"source_length": LENGTH} if name == "bert" else {"target_length": LENGTH}
    workload = workload_of(model, len(inputs["labels"]), **lengths)
    seconds = in_turns({setup: step(name, setup) for setup in SETUPS}, ROUNDS, repeats=1, warm=WARM)
    for label, setup in SETUPS.items():
        converted = workload.converting_tied() if label.startswith("dsq") else workload
        measured, predicted = min(seconds[label]), float(evaluate(converted, setup, hardware).total.seconds)
        yield {
            "model": name,
            "setup": label,
            "measured_ms": 1e3 * measured,
            "predicted_ms": 1e3 * predicted,
            "off": predicted / measured - 1,
        }


def _made(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    (width, blocks, heads, sequences), fields = MODELS[name]
    return transformer(name, width, blocks, heads, WORDS, (sequences, LENGTH), "eager", **fields)


def step(name: str, setup: str) -> Call:
    """One training step of the model."""
    model, inputs = _made(name)
    if setup.startswith("dsq"):
        dsq.convert(model, dsq.DSQConfig(levels=setup.removeprefix("dsq "), tied=True))  # type: ignore[arg-type]
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        optimiser.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=setup.startswith("bf16")):
            loss = model(**inputs).loss
        loss.backward()
        optimiser.step()

    return run


if __name__ == "__main__":
    sys.exit(main())
