"""Files appear whole or not at all; what is no regular file is written through and stays what it is."""

import fcntl
import os
import stat
import subprocess
import sys
import threading

import pytest

from dsq.command.files import check_writable, make_folder, refuse_used, turn_at, write_text, write_whole


def test_a_regular_file_appears_whole_or_not_at_all(tmp_path):
    out = tmp_path / "a.csv"
    write_text(out, "old ü")
    out.chmod(0o640)

    def half(file):
        assert file.suffix == ".csv"
        file.write_text("half")
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_whole(out, half)
    assert out.read_text(encoding="utf-8") == "old ü"
    write_text(out, "new")
    assert out.read_text() == "new"
    assert stat.S_IMODE(out.stat().st_mode) == 0o640
    assert os.listdir(tmp_path) == ["a.csv"]


def test_a_symbolic_link_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.txt"
    link.symlink_to(tmp_path / "real" / "there.txt")
    for text in ("made", "replaced"):
        check_writable(link)
        write_text(link, text)
        assert link.is_symlink()
        assert (tmp_path / "real" / "there.txt").read_text() == text


def test_a_device_and_a_fifo_are_written_through(tmp_path):
    check_writable("/dev/null")
    write_text("/dev/null", "gone")
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)
    fifo, read = tmp_path / "fifo", []
    os.mkfifo(fifo)
    reader = threading.Thread(target=lambda: read.append(fifo.read_text()))
    check_writable(fifo)
    reader.start()
    write_text(fifo, "through")
    reader.join()
    assert read == ["through"]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_standard_output_keeps_what_else_was_printed(name, tmp_path):
    code = f"from dsq.command.files import *\nname = '{name}'\n"
    code += "check_writable(name)\nprint('a')\nwrite_text(name, 'b\\n')\nprint('c')"
    with open(tmp_path / "out", "w") as redirected:
        subprocess.run([sys.executable, "-c", code], stdout=redirected, check=True)
    assert (tmp_path / "out").read_text() == "a\nb\nc\n"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "a\nb\nc\n"


def test_what_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("mine")
    for path, said in [
        (tmp_path, "is a folder: name a file"),
        (tmp_path / "none" / "x", "there is no folder"),
        (tmp_path / "file" / "x", "there is no folder"),
        ("/proc/x", "cannot be written"),
    ]:
        with pytest.raises(ValueError, match=rf"^output {path} .*{said}"):
            check_writable(path)
        with pytest.raises(ValueError, match=rf"^output {path} cannot be written: "):
            write_text(path, "")
    assert (tmp_path / "file").read_text() == "mine"


def test_a_folder_that_is_there_may_be_gone_on_with_but_not_taken_for_new(tmp_path):
    make_folder(tmp_path / "a" / "b")
    assert list((tmp_path / "a" / "b").iterdir()) == []
    make_folder(tmp_path / "a")
    refuse_used(tmp_path / "a" / "b")
    with pytest.raises(ValueError, match=r"--out .*/a: there already; give a new or empty directory, or x$"):
        refuse_used(tmp_path / "a", ", or x")
    with pytest.raises(ValueError, match=r"--out /proc/run: .*; give a directory that can be written to$"):
        make_folder(type(tmp_path)("/proc/run"))


def test_a_turn_is_taken_at_a_file_that_can_be_written(tmp_path, monkeypatch):
    """As NFS asks of an exclusive lock: flock(2)."""
    locked = []
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, _: locked.append(descriptor_of(descriptor)))

    def descriptor_of(descriptor: int) -> tuple[bool, int]:
        return stat.S_ISREG(os.fstat(descriptor).st_mode), fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE

    with turn_at(tmp_path):
        assert locked == [(True, os.O_RDWR)]
