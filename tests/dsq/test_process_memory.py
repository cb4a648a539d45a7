"""The settings are made once, can be declined, and are no error where they are refused; then memory goes back."""

import ctypes
import logging
import os
import platform
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch

import dsq
from dsq import process_memory

needs_glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's settings")


@pytest.fixture(autouse=True)
def _new_process(monkeypatch, tmp_path, caplog):
    """As if nothing had been set yet, on a system whose huge pages are for who asks."""
    caplog.set_level(logging.INFO, "dsq")
    monkeypatch.setenv(process_memory.SWITCH, "")  # which the end of the test gives back
    monkeypatch.setenv(process_memory.HUGE_PAGES, "1")
    _system_gives(tmp_path, monkeypatch, "always [madvise] never")
    caches = process_memory.release_memory, process_memory.suit_a_packed_stash
    for function in caches:
        function.cache_clear()
    yield
    for function in caches:
        function.cache_clear()


def _system_gives(folder, monkeypatch, modes):
    (folder / "enabled").write_text(modes)
    monkeypatch.setattr(process_memory, "_MODES", folder / "enabled")


def test_without_proc_nothing_is_known(monkeypatch, tmp_path):
    monkeypatch.setattr(process_memory, "_STATUS", tmp_path / "status")
    assert process_memory.resident() == {}


def test_a_process_can_decline(monkeypatch, caplog):
    monkeypatch.delenv(process_memory.HUGE_PAGES)
    monkeypatch.setenv(process_memory.SWITCH, "0")
    process_memory.ask_for_huge_pages()
    assert not process_memory.release_memory()
    assert process_memory.HUGE_PAGES not in os.environ
    assert not caplog.messages


@needs_glibc
@pytest.mark.parametrize(
    ("modes", "lacks"),
    [("always madvise [never]", "this system has none"), ("[always] madvise never", "")],  # it is never too late
)
def test_the_system_says_whether_there_are_huge_pages_and_without_them_a_packed_stash_sets_nothing(
    modes, lacks, tmp_path, monkeypatch, caplog
):
    _system_gives(tmp_path, monkeypatch, modes)
    monkeypatch.setattr(torch, "UntypedStorage", None)  # a tensor is not asked
    process_memory.suit_a_packed_stash()
    goes_back = "freed memory goes back to the system"
    stays = f"freed memory stays in the process, as huge pages are missing: {lacks}"
    assert caplog.messages[0] == (stays if lacks else goes_back)
    caplog.clear()
    process_memory.release_memory.cache_clear()
    assert process_memory.release_memory()
    assert process_memory.release_memory()  # and logs nothing again
    assert caplog.messages == [goes_back, f"large blocks lie on {f'small pages: {lacks}' if lacks else 'huge pages'}"]


def test_a_variable_of_the_user_stays(monkeypatch):
    monkeypatch.setenv(process_memory.HUGE_PAGES, "0")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setattr(ctypes, "CDLL", None)  # which is not asked
    assert process_memory.release_memory()
    assert os.environ[process_memory.HUGE_PAGES] == "0"


@pytest.mark.parametrize(
    ("library", "why"),
    [(object(), "this C library has no such setting"), (SimpleNamespace(mallopt=lambda *_: 0), "glibc refused")],
)
def test_an_allocator_that_refuses_is_no_error(library, why, monkeypatch, caplog):
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library)
    assert not process_memory.release_memory()
    assert caplog.messages[0] == f"freed memory stays in the process: {why}"


#: what a packed stash does to glibc's heap: large blocks go, small ones between them stay. Prints MiB that are left,
#: and those that the process gives back when small blocks go
_LARGE_AND_SMALL = """
import logging, sys
when = sys.argv[1]
if when == "too late":
    import torch
    torch.ones(2**20)
import dsq
if when == "first":
    assert dsq.release_memory()
    assert "torch" not in sys.modules
import torch
from dsq.process_memory import resident
torch.ones(7 * 2**20)  # glibc's threshold rises to 28 MiB when this goes
if "late" in when:
    logging.basicConfig(level="INFO")  # to stderr
    dsq.release_memory()
before, kept = resident()["resident"], []
for _ in range(50):
    large = [torch.ones(2 * 2**20), torch.ones(2**14)]
    kept.append(large.pop())
    kept.append(large)
for thing in kept:
    if isinstance(thing, list):
        thing.clear()
left = (resident()["resident"] - before) / 2**20
small = [torch.ones(2**18) for _ in range(40)]
before = resident()["resident"]
small.clear()
print(left, (before - resident()["resident"]) / 2**20)
"""


@cache
def _left(when, **environment):
    command = [sys.executable, "-c", _LARGE_AND_SMALL, when]
    inherited = {name: value for name, value in os.environ.items() if name != process_memory.HUGE_PAGES}
    done = subprocess.run(command, env=inherited | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return *map(float, done.stdout.split()), done.stderr


@needs_glibc
def test_a_process_holds_less_than_one_without():
    assert _left("never")[0] > 300  # of 400
    assert _left("late", DSQ_ALLOCATOR="0")[0] > 300
    for left, small, _ in map(_left, ("first", "late")):
        assert left < 100
        assert small < 4  # of 40: small blocks stay for the next step


@needs_glibc
def test_dsq_is_to_be_imported_before_the_first_tensor():
    if "[madvise]" not in process_memory.Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("huge pages are not for who asks")
    assert "large blocks lie on huge pages" in _left("late")[2]
    assert "import dsq before them, or start Python with THP_MEM_ALLOC_ENABLE=1" in _left("too late")[2]
    assert "large blocks lie on huge pages" in _left("too late", THP_MEM_ALLOC_ENABLE="1")[2]


def test_a_model_that_is_packed_too_late_says_what_to_do(monkeypatch):
    monkeypatch.setattr(process_memory, "_missing_huge_pages", lambda: process_memory._TOO_LATE)
    with pytest.warns(UserWarning, match="import dsq before them, or start Python with THP_MEM_ALLOC_ENABLE=1"):
        dsq.DynamicPrecision(torch.nn.Linear(32, 32))
