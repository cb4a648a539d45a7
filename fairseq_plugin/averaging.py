"""dsq-average: average the weights of several checkpoints, as fairseq's scripts/average_checkpoints.py does.

That script adds up everything in a checkpoint's model, and the state of DSQ is no tensor. Here everything but the
weights comes from the last checkpoint, so the result generates at the level of its last update.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dsq.command import OneLineParser, check_writable
from fairseq_plugin import bleu_counts, checkpoints
from fairseq_plugin.flags import InputError


def average(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the last checkpoint with the mean of all weights. Raises InputError if the models differ."""
    result = _load(paths[-1])
    tensors = {name: value for name, value in result["model"].items() if isinstance(value, Tensor)}
    weights = {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}
    sums = {name: tensor.double() for name, tensor in weights.items()}
    for path in paths[:-1]:
        model = _load(path)["model"]
        for name, tensor in weights.items():
            if getattr(model.get(name), "shape", None) != tensor.shape:
                raise InputError(f"--inputs: {path} is of another model than {paths[-1]}: {name} differs")
            sums[name] += model[name]
    result["model"].update({name: (sums[name] / len(paths)).to(tensor.dtype) for name, tensor in weights.items()})
    return result


def _load(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise InputError(f"--inputs: {path} does not exist: give checkpoints that dsq-train wrote")
    state: dict[str, Any] = checkpoints.checked(bleu_counts.reading_counts(torch.load))(str(path), map_location="cpu")
    return state


def cli_main() -> None:
    """Run the command with the arguments of the process."""
    parser = OneLineParser(description=__doc__)
    parser.add_argument("--inputs", nargs="+", type=Path, required=True, help="checkpoints of one run, the newest last")
    parser.add_argument("--output", required=True, metavar="FILE", help="file of the averaged checkpoint")
    arguments = parser.parse_args()
    try:
        check_writable(arguments.output)
    except ValueError as error:
        raise InputError(f"--output: {error}") from None
    checkpoints.save(average(arguments.inputs), arguments.output)
