"""Costs of a training: memory, time, DRAM bytes, multiplier work, roofline bound. Imports no torch.

workloads/   shapes of a training step: named models, a Hugging Face config.json, a traced model's file
model/       operations, methods -> ledger -> traffic, entries -> memory, roofline, from first principles
planning/    does it fit, how long is a step, over how many devices, what would help
hardware/    peaks and bandwidths, each with its source
paper/       the calibrated model that reproduces the published tables, and the tables themselves
cli/         dsq-cost
prediction.py  what a training run will cost, for those who start one
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from costmodel.planning.plan import Plan


def plan(workload: str, hardware: str = "a100-80gb", *, fit: float = 0, qlora: int = 0, **options: Any) -> "Plan":
    """Answer whether a training fits, how fast it is, what bounds it and what would help: `dsq-cost plan`.

    Args:
        workload: a model's name, a config.json or a workload file. hardware: a device's name or a .toml file.
        fit: bytes of a device's memory; 0: the hardware's.
        qlora: rank of adapters over weights of 4 bits.
        options: those of `dsq-cost plan`: sequences, tokens, lora, freeze, chunked_loss, eager_attention (fields of
            `costmodel.workloads.named.AskedStep`), devices, zero, tensor, pipeline, accumulate, optimiser (fields of
            `costmodel.planning.plan.Question`).
    Returns:
        the plan: `answer` in words, `best`, `rows`, and `as_dict()`, which is what `--json` prints.
    Raises:
        ValueError: what is asked cannot be planned. TypeError: an option that there is not.
    """
    from costmodel.hardware.hardware import load_hardware
    from costmodel.planning.plan import NF4_BITS, Question
    from costmodel.workloads.named import AskedStep

    if qlora and "lora" in options:
        raise ValueError("give lora or qlora, not both: qlora has a rank of its own")
    ours = {name: options.pop(name) for name in list(options) if name in vars(AskedStep())}
    step = AskedStep(workload, **ours | ({"lora": qlora} if qlora else {}))
    bits = NF4_BITS if qlora else 0
    return Question(step, load_hardware(hardware), budget=fit, base_bits=bits, **options).ask()
