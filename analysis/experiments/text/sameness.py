"""Whether text is still that of which something was made."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from dsq.command.files import write_text

FILE = "text.sha256"


class Text(Protocol):
    """A split, as it was read."""

    @property
    def columns(self) -> Sequence[Sequence[str]]: ...


def check_same(text: Mapping[str, Text], folder: Path) -> str:
    """The SHA-256 of the sentences, wherever and however packed they lie; the first call records it in ``folder``.

    Raises ValueError where another is recorded: what was made there is of other sentences.
    """
    digest = hashlib.sha256()
    for split, part in text.items():
        for column in part.columns:
            digest.update(f"{split} {len(column)}\n".encode())
            for line in column:
                digest.update(f"{line}\n".encode())
    found, record = digest.hexdigest(), folder / FILE
    if not record.exists():
        write_text(record, f"{found}\n")
    elif record.read_text(encoding="utf-8").strip() != found:
        raise ValueError(f"{folder}: was made of other text than --data has now: put that back, or give another --out")
    return found
