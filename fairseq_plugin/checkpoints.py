"""Write checkpoints whole or not at all, and check them on reading.

A checkpoint of torch.save is a zip file with a CRC-32 of every part, which torch.load does not compare.
"""

import functools
import os
import shutil
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fairseq_plugin.flags import InputError


def is_whole(path: str | Path) -> bool:
    """Return whether every byte of the checkpoint is as written; False for torch's older format, which has no sums."""
    try:
        with zipfile.ZipFile(path) as parts:
            return parts.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError):
        return False  # of a zip file with a damaged header, directory or length


def _has_sums(path: str | Path) -> bool:
    with open(path, "rb") as file:
        return file.read(4) == b"PK\x03\x04"  # as a zip file begins


def _newest_first(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.pt"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def checked(load: Callable) -> Callable:
    """Return ``load``, which here refuses a damaged checkpoint or another file, and names one to resume from."""

    @functools.wraps(load)
    def load_whole(path: str, *args: Any, **kwargs: Any) -> Any:
        cause: Exception | None = None
        if is_whole(path) or not _has_sums(path):
            try:
                return load(path, *args, **kwargs)
            except Exception as error:  # other bytes than a checkpoint's end in an error of any class
                cause = error
        files = (file for file in _newest_first(Path(path).parent) if file != Path(path))
        newest = next((file for file in files if is_whole(file)), None)
        raise InputError(
            f"checkpoint {path} cannot be read: it is damaged, or no checkpoint of dsq-train; "
            + (f"the newest whole one beside it is {newest}" if newest else "there is no whole one beside it")
        ) from cause

    return load_whole


def save(state: Any, filename: str, async_write: bool = False) -> None:
    """Write a checkpoint, whole or not at all, in place of fairseq's torch_persistent_save.

    Raises InputError if it cannot be written; an earlier file of that name is then untouched.
    """
    _put(filename, lambda temporary: torch.save(state, temporary))


def copy(source: str, target: str, overwrite: bool = False) -> bool:
    """Copy a checkpoint, whole or not at all, in place of fairseq's PathManager.copy. Raises as ``save`` does."""
    _put(target, lambda temporary: shutil.copyfile(source, temporary))
    return True


def _put(filename: str, write: Callable[[str], object]) -> None:
    temporary = filename + ".tmp"  # one name, so that the next run removes the file of a killed one
    try:
        Path(temporary).unlink(missing_ok=True)  # also a symbolic link, whose target is not written to
        write(temporary)
        with open(temporary, "rb") as written:
            os.fsync(written.fileno())
        os.replace(temporary, filename)
    except (OSError, RuntimeError) as error:  # torch.save's errors of a full disk are RuntimeErrors
        Path(temporary).unlink(missing_ok=True)
        reason = error.strerror if isinstance(error, OSError) else "the file could not be finished"
        newest = next(iter(_newest_first(Path(filename).parent)), None)
        raise InputError(
            f"--save-dir: {filename} cannot be written ({reason}): make room, then give the same command again; "
            + (f"it goes on from {newest}" if newest else "there is no earlier checkpoint")
        ) from error


def make_folder(folder: str) -> None:
    """Make the folder of a run, in place of fairseq's verify_checkpoint_directory.

    Raises InputError if nothing can be written there.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"--save-dir or --destdir: {folder} cannot be written to ({error.strerror}): give another directory"
        ) from error
