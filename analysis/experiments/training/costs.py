"""What a finished run cost by the cost model: its own model's shapes, its own work at each level."""

import json
from pathlib import Path

import dsq.workload
from costmodel.cli import estimate_command, main
from dsq.command.files import write_text


def write_workload(checkpoint: Path, binary: Path, out: Path) -> None:
    """Describe one training step of the checkpoint's model, on a batch of its own training text, as a workload file."""
    import fairseq_plugin  # noqa: F401 - its shims, before fairseq

    from fairseq import checkpoint_utils  # isort: skip

    (model,), config, task = checkpoint_utils.load_model_ensemble_and_task(
        [str(checkpoint)], arg_overrides={"data": str(binary)}
    )
    task.load_dataset("train")
    batches = task.get_batch_iterator(task.dataset("train"), max_tokens=config.dataset.max_tokens, seed=1)
    sample = next(iter(batches.next_epoch_itr(shuffle=True)))
    model.train()
    write_text(out, json.dumps(dsq.workload.trace(model, **sample["net_input"])) + "\n")


def costs(history: Path, workload: Path) -> dict[str, dict[str, float]]:
    """profile -> arithmetic and dram of the run, relative to fixed-point 32: `dsq-cost estimate --history ...`."""
    found = {}
    for profile in ("first-principles", "paper"):
        given = ["estimate", "--history", str(history), "--workload", str(workload), "--profile", profile]
        mean = estimate_command.run(main.parser().parse_args(given)).sections[0].records[-1]
        found[profile] = {name: mean[name] for name in ("arithmetic", "dram")}
    return found
