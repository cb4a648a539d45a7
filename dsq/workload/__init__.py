"""A live model as a workload file for `dsq-cost`: plain data, no import of the cost model.

workload = dsq.workload.trace(model, tokens)
json.dump(workload, open("model.json", "w"))      # dsq-cost estimate "[16,4,4,16]" --workload model.json

recorder.py         sees the linears and the operations that a forward runs, and what each is recorded as
of_transformers.py  the workload of a config.json
calibration.py      times of this machine
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from dsq.arguments import as_called
from dsq.conversion import as_unconverted
from dsq.workload.recorder import Entry, Recorder

#: version of the workload schema (costmodel/workloads/workload_file.py)
SCHEMA = 1


def trace(model: nn.Module, *inputs: Any, **keywords: Any) -> Entry:
    """Run `model(*inputs, **keywords)` once and describe the training step it stands for.

    Every matrix product is recorded with its shapes, from nn.Linear modules and from below (attention's products, fused
    attention, packed projections, convolutions, those of a scan), with whether each side needs a gradient; norms,
    softmax, activations, residual sums, embeddings and the loss as passes over their tensors; one Adam update at the
    end. Linear layers that share one input tensor name the same input. A converted model runs as it was before:
    products that converted layers make are marked quantized; in a model with no converted layer, those of layers that
    `dsq.convert` would convert. The model's buffers stay as they are.

    Args:
        model: the module, in the mode (train or eval) to be described.
        inputs, keywords: example arguments, or one batch whose keys are names of the forward's; the tokens of the first
            tensor among them are the step's tokens.
    Returns:
        JSON-able dict that `dsq-cost --workload FILE` reads.
    Raises:
        TypeError: `model` is no module. ValueError: no tensor among the inputs, an empty first one, or no
            matrix product in the forward.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"trace takes a torch.nn.Module, got {type(model)}")
    if isinstance(model, nn.DataParallel):  # which functional_call refuses
        return trace(model.module, *inputs, **keywords)
    inputs, keywords = as_called(model, inputs, keywords)
    tensors = [value for value in (*inputs, *keywords.values()) if isinstance(value, Tensor)]
    if not tensors:
        raise ValueError("trace needs at least one tensor among the example inputs")
    first = tensors[0]
    if not first.numel():
        raise ValueError(f"trace needs a batch with at least one token, got a tensor of shape {tuple(first.shape)}")
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}  # BatchNorm counts what it sees
    recorder = Recorder(model)
    recorder.ignore(tensors + list(buffers.values()))
    with as_unconverted(model), recorder.hooks(), recorder, torch.enable_grad(), recorder.saving():
        name = type(model).__name__  # its own, which a conversion may change
        functional_call(model, buffers, inputs, keywords)
    if not any(entry["op"] == "gemm" for entry in recorder.operations):
        raise ValueError(f"the forward of {name} multiplies no matrices: there is nothing to cost")
    for trained in (True, False):
        unseen_values = sum(p.numel() for p in model.parameters() if p.requires_grad is trained and recorder.own(p))
        if unseen_values:
            recorder.add_pass("unseen", "parameters", 1, 1, parameters=unseen_values, trained=trained)
    updated_values = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    if updated_values:
        recorder.add_pass("optimizer", "adam", updated_values, 1)
    return {
        "costmodel": SCHEMA,
        "name": name,
        "tokens": first.numel() if not first.is_floating_point() else math.prod(first.shape[:-1]),
        "source": "dsq.workload.trace",
        "operations": recorder.operations,
    }
