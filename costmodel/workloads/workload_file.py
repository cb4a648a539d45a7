"""Workloads as JSON: what dsq.workload.trace writes of a live model, and dsq-cost reads.

{"costmodel": 1, "name": "...", "tokens": 4096, "operations": [
    {"op": "gemm", "name": "...", "M": 4096, "K": 512, "N": 512, ...},   fields of operations.Gemm
    {"op": "pointwise", "name": "...", "kind": "norm", "rows": 4096, "width": 512, ...}]}   fields of
    operations.Pointwise

saves, of either, is a list of [role, tensor, values, bits]: fields of operations.TracedTensor.
"""

from dataclasses import MISSING, fields
from typing import Any, cast

from dsq.arguments import choice
from dsq.costmodel.fields import Fields
from dsq.costmodel.model.ledger import POINTWISE
from dsq.costmodel.model.operations import CLASSES, Gemm, Operation, Pointwise, TracedTensor, Workload

VERSION = 1
MAX_SIZE = 2**48
#: forward products that a backward may run again
MAX_RECOMPUTED = 16
_OPERATIONS: dict[str, type[Operation]] = {"gemm": Gemm, "pointwise": Pointwise}
_CHOICES = {"cls": CLASSES, "kind": tuple(POINTWISE), "on_chip": ("", "x", "y"), "container": ("", "r", "state")}
_MAY_BE_ZERO = ("parameters", "recompute", "pairs", "x_values", "mask", "bias", "score_bytes", "bits")


def is_workload(data: Any) -> bool:
    return isinstance(data, dict) and "costmodel" in data


def parse(data: dict[str, Any], where: str) -> Workload:
    """Return the workload of the JSON data. Raises ValueError that names the operation and the field."""
    file = Fields(data, f"workload file {where}: field ")
    file.refuse(data["costmodel"] != VERSION, f"costmodel must be {VERSION}, not {data['costmodel']!r}")
    entries = file.tables("operations") if isinstance(data.get("operations"), list) else []
    operations = tuple(map(_operation, entries))
    has_gemm = any(isinstance(op, Gemm) for op in operations)
    file.refuse(not has_gemm, "operations must be a list with at least one gemm")
    tokens = file.whole("tokens", most=MAX_SIZE - 1)
    return Workload(file.get("name", str), operations, tokens, str(data.get("source", "")))


def _operation(entry: Fields) -> Any:
    kind = _OPERATIONS[choice(f"{entry.label}op", entry.find("op"), _OPERATIONS)]
    names = [field.name for field in fields(kind)]
    unknown = set(entry.data) - {"op", *names}
    entry.refuse(unknown, f"{min(unknown, default='')} is not one of {', '.join(names)}")
    return _read(kind, entry)


def _read(kind: type[Operation] | type[TracedTensor], entry: Fields) -> Any:
    """Return a dataclass of the entry's fields; those that it leaves out must have a default."""
    values = dict[str, Any]()
    for field in fields(kind):
        name, field_type = field.name, cast(type, field.type)
        if field.default is not MISSING and name not in entry.data:
            continue
        if name == "saves":
            values[name] = _saves(entry)
        elif field_type is int:
            most = MAX_RECOMPUTED if name == "recompute" else MAX_SIZE - 1
            values[name] = entry.whole(name, least=int(name not in _MAY_BE_ZERO), most=most)
        else:
            values[name] = entry.get(name, field_type)
            accepted = _CHOICES.get(name, (values[name],))
            entry.refuse(
                values[name] not in accepted,
                f"{name} must be one of {', '.join(map(repr, accepted))}, not {values[name]!r}",
            )
    return kind(**values)


def _saves(entry: Fields) -> tuple[TracedTensor, ...]:
    rows, names = entry.find("saves"), [field.name for field in fields(TracedTensor)]
    are_rows = isinstance(rows, list) and all(isinstance(row, list) and len(row) == len(names) for row in rows)
    entry.refuse(not are_rows, f"saves must be a list of [{', '.join(names)}], not {rows!r}")
    tensors = [Fields(dict(zip(names, row, strict=True)), f"{entry.label}saves.") for row in rows]
    return tuple(_read(TracedTensor, tensor) for tensor in tensors)
