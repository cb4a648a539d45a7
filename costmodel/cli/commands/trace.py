"""dsq-cost trace: a model of transformers as a workload file."""

import argparse
import json
from importlib import import_module

from costmodel.cli.answer import Answer, Section
from costmodel.workloads import workload_file
from dsq.arguments import whole_number
from dsq.command import check_writable, write_text


def run(arguments: argparse.Namespace) -> Answer:
    if not arguments.file.endswith(".json"):
        raise ValueError(f"workload file {arguments.file} must end in .json, for --workload to know it")
    sizes = (whole_number(name, getattr(arguments, name), 1) for name in ("sequences", "tokens"))
    check_writable(arguments.file)
    try:  # tracing needs torch and transformers, which nothing else of the cost model does: named, not imported
        module = import_module("dsq.workload.of_transformers")
        import_module("transformers")
    except ImportError as error:
        raise ValueError(f"trace runs a model of transformers, which cannot be imported: {error}") from None
    data = module.trace_config(arguments.model, *sizes)
    write_text(arguments.file, json.dumps(data))
    workload = workload_file.parse(data, arguments.file)
    record = {"workload": workload.name, "tokens": workload.tokens, "parameters": workload.parameters}
    record |= {"operations": len(workload.operations), "GMAC": workload.macs / 1e9}
    shown = {"workload": "", "tokens": ",", "parameters": ",", "operations": ",", "GMAC": ",.1f"}
    notes = [
        f"written: {arguments.file}, for --workload {arguments.file}. Its attention is unfused: --fused-attention."
    ]
    return Answer([Section("traced", f"A training step of {arguments.model}", [record], shown)], notes)
