"""The machine as a hardware file: what it says of itself, and what was measured."""

import os
from datetime import date
from pathlib import Path
from typing import Any

import torch

from dsq.calibration.clock import seconds
from dsq.calibration.passes import passes
from dsq.calibration.products import units
from dsq.command import processor

#: float32 values of the copy: 256 MiB read and as many written, beyond any cache
COPIED = 1 << 26
#: and of an addition that stays within one
ADDED = 1 << 14
#: products and passes are measured so often, and the quickest of each counts: what else runs on a machine only slows
ROUNDS = 2
#: what they are compared by: a product's operations, and values
TYPICAL_FLOPS, TYPICAL_VALUES = 2e8, 5e5


def measure_hardware(device: torch.device) -> dict[str, Any]:
    """The tables of a hardware file, of the schema of costmodel/hardware/hardware.py. Takes under two minutes."""
    torch.manual_seed(0)
    threads = f"{torch.get_num_threads()} threads, " if device.type == "cpu" else ""
    x, y = (torch.empty(COPIED, device=device).fill_(value) for value in (0.0, 1.0))
    copied = seconds(lambda: y.copy_(x))
    a, b = x[:ADDED], y[:ADDED].clone()
    added = seconds(lambda: b.add_(a))
    on_chip, on_chip_source = _on_chip(device)
    rounds = [(units(device), passes(device)) for _ in range(ROUNDS)]
    peaks, passed = (
        [min(alike, key=_seconds) for alike in zip(*found, strict=True)] for found in zip(*rounds, strict=True)
    )
    return {
        "name": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
        "measured": f"{date.today().isoformat()}, {threads}torch {torch.__version__}",
        "bandwidth": {"gb_per_s": 8e-9 * COPIED / copied, "source": "measured: copy of 256 MiB, read and written"},
        "memory": {"gb": _memory(device) * 1e-9, "source": "as the machine reports it"},
        "on_chip": {"mb": on_chip * 1e-6, "source": on_chip_source},
        "vector": {"tflops": 1e-12 * ADDED / added, "source": "measured: addition of 16,384 float32 values"},
        "peak": peaks,
        "pass": passed,
    }


def _seconds(found: dict[str, Any]) -> float:
    """What a product or a pass of a typical size takes."""
    product = TYPICAL_FLOPS / (1e12 * found["tflops"]) if "tflops" in found else 0.0
    passing = TYPICAL_VALUES * 1e-9 * found.get("ns_per_value", 0.0) + 1e-6 * found.get("us_per_call", 0.0)
    return float(product + passing)


def _memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _on_chip(device: torch.device) -> tuple[int, str]:
    """Bytes of the largest cache, as the system has it."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size), "level-2 cache, as the driver reports it"
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    kilobytes = [int(size.removesuffix("K")) for size in sizes]
    if not kilobytes:
        return 1 << 20, "assumed: the system does not report its caches"
    return max(kilobytes) * 1024, "largest cache that /sys reports"
