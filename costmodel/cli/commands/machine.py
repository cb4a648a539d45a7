"""dsq-cost calibrate, trace: this machine as a hardware file, a model of transformers as a workload file. Both need
torch, which nothing else of the cost model does: its modules are named, not imported."""

import argparse
import json
import logging
import sys
from importlib import import_module
from typing import Any

from dsq.arguments import whole_number
from dsq.command import check_writable, write_text
from dsq.costmodel.cli.answer import Answer, Record, Section
from dsq.costmodel.hardware.hardware import load_hardware
from dsq.costmodel.workloads import workload_file
from dsq.process_memory import keep_freed_memory


def calibrate(arguments: argparse.Namespace) -> Answer:
    if not arguments.file.endswith(".toml"):
        raise ValueError(f"hardware file {arguments.file} must end in .toml, for --hardware to know it")
    check_writable(arguments.file)
    measured = _measure(arguments.device)
    write_text(arguments.file, toml(measured))
    hardware = load_hardware(arguments.file)  # it is one
    columns = ("datatype", "tflops", "ns_per_value", "us_per_call")
    peaks: list[Record] = [{name: peak.get(name) for name in columns} for peak in measured["peak"]]
    notes = [
        f"written: {arguments.file}, for --hardware {arguments.file}.",
        f"DRAM {hardware.bandwidth / 1e9:.1f} GB/s (copy); a product takes operations / rate + values of operands and "
        "result x ns per value + us per call; pack: bits are the code's, backward is unpacking.",
    ]
    products = Section("peak", f"Products on {hardware.name}, {hardware.rates}", peaks, "peak")
    return Answer([products, Section("pass", "Passes", measured["pass"], "pass")], notes)


def _measure(device: str | None) -> dict[str, Any]:
    """Measure this machine. Raises ValueError where there is no torch, or no such device."""
    try:
        torch = import_module("torch")
        calibration = import_module("dsq.workload.calibration")
    except ImportError as error:
        raise ValueError(f"calibrate measures with torch, which cannot be imported: {error}") from None
    device_type = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device_type == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda: torch finds no GPU")
    print(f"dsq-cost calibrate: measuring the {device_type}, for 30 to 60 s", file=sys.stderr, flush=True)
    keep_freed_memory()  # as a training's heap does
    measured: dict[str, Any] = calibration.measure_hardware(torch.device(device_type))
    return measured


def toml(data: dict[str, Any]) -> str:
    """Return a hardware file's data as its text: values, tables, lists of tables."""
    tables = {name: value for name, value in data.items() if isinstance(value, dict | list)}
    parts = ["\n".join(f"{name} = {_value(value)}" for name, value in data.items() if name not in tables)]
    for name, value in tables.items():
        head = f"[{name}]" if isinstance(value, dict) else f"[[{name}]]"
        for table in [value] if isinstance(value, dict) else value:
            parts.append("\n".join([head, *(f"{key} = {_value(entry)}" for key, entry in table.items())]))
    return "\n\n".join(parts) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(entry)}' for key, entry in value.items())} }}"
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def trace(arguments: argparse.Namespace) -> Answer:
    if not arguments.file.endswith(".json"):
        raise ValueError(f"workload file {arguments.file} must end in .json, for --workload to know it")
    sizes = (whole_number(name, getattr(arguments, name), 1) for name in ("sequences", "tokens"))
    check_writable(arguments.file)
    logging.disable(logging.WARNING)  # those of torchao and transformers, of what no trace needs
    try:
        module = import_module("dsq.workload.of_transformers")
        import_module("transformers")
        data = module.trace_config(arguments.model, *sizes)
    except ImportError as error:
        raise ValueError(f"trace runs a model of transformers, which cannot be imported: {error}") from None
    finally:
        logging.disable(logging.NOTSET)
    write_text(arguments.file, json.dumps(data))
    workload = workload_file.parse(data, arguments.file)
    record = {"workload": workload.name, "tokens": workload.tokens, "parameters": workload.parameters}
    record |= {"operations": len(workload.operations), "GMAC": workload.macs / 1e9}
    note = f"written: {arguments.file}, for --workload {arguments.file}. Its attention is unfused: --fused-attention."
    return Answer([Section("traced", f"A training step of {arguments.model}", [record], "traced")], [note])
