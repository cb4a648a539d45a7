"""Workloads as JSON: what dsq.workload.trace writes of a live model, and dsq-cost reads.

{"costmodel": 1, "name": "...", "tokens": 4096, "operations": [
    {"op": "gemm", "name": "...", "M": 4096, "K": 512, "N": 512, ...},   fields of operations.Gemm
    {"op": "pointwise", "name": "...", "kind": "norm", "rows": 4096, "width": 512, ...}]}   fields of
    operations.Pointwise

saves, of either, is a list of [role, tensor, values, bits]: fields of operations.TracedTensor.
"""

from dataclasses import MISSING, fields
from typing import Any

from dsq.costmodel.model.ledger import POINTWISE
from dsq.costmodel.model.operations import CLASSES, Gemm, Operation, Pointwise, TracedTensor, Workload
from dsq.costmodel.names import refuse

VERSION = 1
MAX_SIZE = 2**48
#: forward products that a backward may run again
MAX_RECOMPUTED = 16
_OPERATIONS: dict[str, type[Gemm] | type[Pointwise]] = {"gemm": Gemm, "pointwise": Pointwise}
_CHOICES = {"cls": CLASSES, "kind": tuple(POINTWISE), "on_chip": ("", "x", "y"), "container": ("", "r", "state")}
_MAY_BE_ZERO = ("parameters", "recompute", "pairs", "x_values", "mask", "bias", "score_bytes", "bits")


def is_workload(data: Any) -> bool:
    return isinstance(data, dict) and "costmodel" in data


def parse(data: dict[str, Any], where: str) -> Workload:
    """Return the workload of the JSON data. Raises ValueError that names the operation and the field."""
    try:
        refuse((data["costmodel"] != VERSION, f"costmodel must be {VERSION}, not {data['costmodel']!r}"))
        operation_list = data.get("operations")
        entries = operation_list if isinstance(operation_list, list) else []
        operations = tuple(_operation(entry, f"operations[{index}]") for index, entry in enumerate(entries))
        refuse((not any(isinstance(op, Gemm) for op in operations), "operations must be a list with at least one gemm"))
        name, tokens = _value(data.get("name"), str, "name"), _value(data.get("tokens"), int, "tokens")
    except ValueError as error:
        raise ValueError(f"workload file {where}: field {error}") from None
    return Workload(name, operations, tokens, str(data.get("source", "")))


def _operation(entry: Any, label: str) -> Operation:
    op = entry.get("op") if isinstance(entry, dict) else None
    if not isinstance(op, str) or op not in _OPERATIONS:
        raise ValueError(f"{label}.op must be one of {', '.join(_OPERATIONS)}")
    types = {field.name: field for field in fields(_OPERATIONS[op])}
    missing = [name for name, field in types.items() if field.default is MISSING and name not in entry]
    unknown = set(entry) - set(types) - {"op"}
    if unknown or missing:
        fault = f"{min(unknown)} is not one of {', '.join(types)}" if unknown else f"{missing[0]} is missing"
        raise ValueError(f"{label}.{fault}")
    values: dict[str, Any] = {
        name: _saves(value, f"{label}.saves") if name == "saves" else _value(value, types[name].type, f"{label}.{name}")
        for name, value in entry.items()
        if name != "op"
    }
    for name in values.keys() & _CHOICES.keys():
        accepted = ", ".join(map(repr, _CHOICES[name]))
        refuse((values[name] not in _CHOICES[name], f"{label}.{name} must be one of {accepted}, not {values[name]!r}"))
    return _OPERATIONS[op](**values)


def _saves(tensors: Any, label: str) -> tuple[TracedTensor, ...]:
    rows = isinstance(tensors, list) and all(isinstance(saved, list) and len(saved) == 4 for saved in tensors)
    refuse((not rows, f"{label} must be a list of [role, tensor, values, bits], not {tensors!r}"))
    return tuple(
        TracedTensor(
            _value(role, str, f"{label}.role"),
            _value(tensor, str, f"{label}.tensor"),
            _value(values, int, f"{label}.values"),
            _value(bits, int, f"{label}.bits"),
        )
        for role, tensor, values, bits in tensors
    )


def _value(value: Any, kind: Any, label: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{label} must be {kind.__name__}, not {value!r}")
    name = label.rpartition(".")[2]
    least, most = int(name not in _MAY_BE_ZERO), MAX_RECOMPUTED if name == "recompute" else MAX_SIZE - 1
    if kind is int and not least <= value <= most:
        raise ValueError(f"{label} must be from {least} to {most}, not {value}")
    return value
