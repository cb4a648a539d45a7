import platform
from pathlib import Path

import pytest

from dsq.command.processor import processor

CPUINFO = """processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: Xeon
stepping\t: 8

processor\t: 1
model name\t: another
"""


def test_the_processor_is_that_of_the_first_core_and_has_a_name_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: CPUINFO)
    assert processor.__wrapped__() == "Xeon 6 143 8"
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "CPU implementer : 0x41\n")
    assert processor.__wrapped__() == (platform.processor() or platform.machine())
