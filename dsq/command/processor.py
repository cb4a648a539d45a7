"""What this machine is called, in records of what ran on it."""

import platform
import re
from functools import cache
from pathlib import Path


@cache
def processor() -> str:
    """The CPU's name, family, model and stepping, as Linux gives them; elsewhere what Python knows."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        first = ""
    facts = dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
    named = [facts[name] for name in ("model name", "cpu family", "model", "stepping") if name in facts]
    return " ".join(named) or platform.processor() or platform.machine()
