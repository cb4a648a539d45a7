"""Memory that the process occupies, beside what its tensors do."""

import re
from pathlib import Path

_STATUS = Path("/proc/self/status")
_FIELDS = {"VmRSS": "resident", "VmHWM": "peak"}


def resident() -> dict[str, int]:
    """Bytes of the resident set, "resident" now and "peak" since the process began; empty where there is no /proc."""
    if not _STATUS.exists():
        return {}
    found = re.findall(r"^(VmRSS|VmHWM):\s*(\d+) kB", _STATUS.read_text(encoding="ascii"), re.MULTILINE)
    return {_FIELDS[name]: int(kib) * 1024 for name, kib in found}
