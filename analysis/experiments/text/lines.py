"""The lines of a text file, plain, .xz or .gz."""

import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import IO

_OPEN: dict[str, Callable[..., IO[str]]] = {"": open, ".xz": lzma.open, ".gz": gzip.open}


def read_lines(path: Path) -> list[str]:
    """Raises ValueError where the file is not UTF-8, or not whole."""
    opener = _OPEN[path.suffix if path.suffix in _OPEN else ""]
    try:
        with opener(path, "rt", encoding="utf-8-sig", newline="\n") as file:
            return [line.rstrip("\r\n") for line in file]
    except UnicodeDecodeError:
        raise ValueError(f"--data: {path.name} is not UTF-8 text") from None
    except (lzma.LZMAError, gzip.BadGzipFile, zlib.error, EOFError):
        raise ValueError(f"--data: {path.name} is not a whole {path.suffix} file") from None
