"""The resident set against memory of a known size."""

import mmap

import pytest

from dsq.stash.meter import resident as module
from dsq.stash.meter.resident import resident


def test_memory_that_was_written_is_resident_until_it_is_freed():
    before = resident()
    if not before:
        pytest.skip("no /proc")
    size = 2**26
    block = mmap.mmap(-1, size)
    block.write(b"x" * size)
    held = resident()
    block.close()
    assert size * 0.95 < held["resident"] - before["resident"] < size * 1.5
    assert held["peak"] >= held["resident"]
    assert held["resident"] - resident()["resident"] > size * 0.9


def test_without_proc_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "_STATUS", tmp_path / "status")
    assert resident() == {}
