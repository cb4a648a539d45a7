"""Where a command writes: regular files appear whole or not at all, special files are written through.

A path is what the user gave: "-" is standard output, a symbolic link is followed.
"""

import contextlib
import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

STDOUT = "-"


def write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a temporary file that ends as ``path`` does, and put that in place of ``path`` in one step.

    Readers see the old file or the new one. Standard output, a device or a FIFO is never replaced: it gets the bytes.
    Raises ValueError, naming ``path``, where it cannot be written.
    """
    try:
        special = _is_special(path)
        target = Path(os.path.realpath(path))
        with tempfile.TemporaryDirectory(dir=None if special else target.parent, prefix=".dsq-") as folder:
            temporary = Path(folder) / target.name
            write(temporary)
            if special:
                _copy(temporary, path)
                return
            if target.exists():
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from None


def write_text(path: str | Path, text: str) -> None:
    """write_whole of ``text`` as UTF-8."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))


def check_writable(path: str | Path) -> None:
    """Raise ValueError, before any work is done, where write_whole could not write to ``path``."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ValueError(f"output {path} is a folder: name a file")
    if _is_special(path):
        if _standard(path) is None and not os.access(path, os.W_OK):
            raise ValueError(f"output {path} cannot be written: Permission denied")
        return
    if not target.parent.is_dir():
        raise ValueError(f"output {path} cannot be written: there is no folder {target.parent}")
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from None


def make_folder(out: Path) -> None:
    """Make the folder --out, before the work whose results go there. Raises ValueError where none can be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as error:
        raise ValueError(f"--out {out}: {error.strerror}; give a directory that can be written to") from None


@contextlib.contextmanager
def turn_at(folder: Path) -> Iterator[None]:
    """Wait until no other process is in such a block for ``folder``, which exists."""
    import fcntl  # of Unix alone, as are the commands that share folders

    descriptor = os.open(folder / ".turn", os.O_RDWR | os.O_CREAT)  # NFS locks no folder, nor what is only read
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def refuse_used(out: Path, otherwise: str = "") -> None:
    """Raise ValueError where --out is there and more than an empty folder; ``otherwise`` ends the message."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"--out {out}: there already; give a new or empty directory{otherwise}")


def _is_special(path: str | Path) -> bool:
    """Whether ``path`` names something other than a file that may be replaced. Raises OSError for a folder."""
    if _standard(path) is not None:
        return True
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    return target.exists() and not target.is_file()


def _copy(made: Path, path: str | Path) -> None:
    stream = _standard(path)
    with made.open("rb") as source:
        if stream is None:
            with open(path, "wb") as target:
                shutil.copyfileobj(source, target)
        else:
            stream.flush()
            shutil.copyfileobj(source, stream.buffer)
            stream.flush()


def _standard(path: str | Path) -> TextIO | None:
    """sys.stdout or sys.stderr where ``path`` is it: "-", /dev/stdout, or the file that it was redirected to."""
    if str(path) == STDOUT:
        return sys.stdout
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(path), os.fstat(descriptor)):
                return stream
    return None
