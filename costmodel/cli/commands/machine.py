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
from dsq.costmodel.names import refuse
from dsq.costmodel.workloads import workload_file
from dsq.process_memory import keep_freed_memory


def calibrate(arguments: argparse.Namespace) -> Answer:
    _check_file(arguments.file, ".toml", "hardware")
    try:
        torch = import_module("torch")
        calibration = import_module("dsq.workload.calibration")
    except ImportError as error:
        raise ValueError(f"calibrate measures with torch, which cannot be imported: {error}") from None
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    refuse((device == "cuda" and not torch.cuda.is_available(), "--device cuda: torch finds no GPU"))
    print(f"dsq-cost calibrate: measuring the {device}, for 30 to 60 s", file=sys.stderr, flush=True)
    keep_freed_memory()  # as a training's heap does
    measured = calibration.measure_hardware(torch.device(device))
    write_text(arguments.file, toml(measured))
    hardware = load_hardware(arguments.file)  # it is one
    columns = ("datatype", "tflops", "ns_per_value", "us_per_call")
    peaks: list[Record] = [{name: peak.get(name) for name in columns} for peak in measured["peak"]]
    sections = [
        Section("peak", f"Products on {hardware.name}, {hardware.rates}", peaks, "peak"),
        Section("pass", "Passes", measured["pass"], "pass"),
    ]
    notes = [
        f"written: {arguments.file}, for --hardware {arguments.file}.",
        f"DRAM {hardware.bandwidth / 1e9:.1f} GB/s (copy); a product takes operations / rate + values of operands and "
        "result x ns per value + us per call; pack: bits are the code's, backward is unpacking.",
    ]
    return Answer(sections, notes)


def _check_file(path: str, ending: str, option: str) -> None:
    refuse((not path.endswith(ending), f"{option} file {path} must end in {ending}, for --{option} to know it"))
    check_writable(path)


def toml(data: dict[str, Any]) -> str:
    """Return a hardware file's data as its text, a line for each field and for each table of a list."""
    return "".join(f"{name} = {_value(value)}\n" for name, value in data.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{key} = {_value(entry)}' for key, entry in value.items())} }}"
    if isinstance(value, list):
        return "\n".join(["[", *(f"    {_value(entry)}," for entry in value), "]"])
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def trace(arguments: argparse.Namespace) -> Answer:
    _check_file(arguments.file, ".json", "workload")
    sizes = (whole_number(name, getattr(arguments, name), 1) for name in ("sequences", "tokens"))
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
    record = {
        "workload": workload.name,
        "tokens": workload.tokens,
        "parameters": workload.parameters,
        "operations": len(workload.operations),
        "GMAC": workload.macs / 1e9,
    }
    note = f"written: {arguments.file}, for --workload {arguments.file}. Its attention is unfused: --fused-attention."
    return Answer([Section("traced", f"A training step of {arguments.model}", [record], "traced")], [note])
