"""All commands share errors of one line, files that appear whole or not at all, tables, and the machine's name.

A user's mistake ends in one line on stderr and exit status 2, with neither usage text nor traceback.
"""

import argparse
import csv
import io
import json
import math
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NoReturn


def fail(prog: str, message: object) -> NoReturn:
    """Print ``prog: error: message`` as one line on stderr and leave with status 2."""
    print(_line(prog, message), file=sys.stderr)
    raise SystemExit(2)


class OneLineParser(argparse.ArgumentParser):
    """argparse without the usage text before its error line, and with descriptions, also of subcommands, as written."""

    def __init__(self, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**options)

    def error(self, message: str) -> NoReturn:
        fail(self.prog, message)


def count(text: str) -> int:
    """Read, as argparse's type, how many there are of something: a whole number from 1."""
    if text.isdecimal() and int(text) >= 1:
        return int(text)
    raise argparse.ArgumentTypeError(f"accepted are whole numbers from 1, got {text!r}")


def guarded(prog: str, work: Callable[[], object]) -> int:
    """Return the exit status of ``work``: 0, or 2 where it raised ValueError or OSError, whose text is then the one
    line, or lacked a package; 130 after Ctrl-C.

    Where the reader of standard output has gone (``| head``), or never was (``>&-``), there is nothing left to say: 0.
    """
    if sys.stdout is None:  # closed before Python started
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    try:
        work()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's own flush at exit succeeds
    except KeyboardInterrupt:
        print(_line(prog, "interrupted"), file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(_line(prog, error), file=sys.stderr)
        return 2
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        print(_line(prog, f"{package} is not installed: pip install 'dsq-torch[plots]'"), file=sys.stderr)
        return 2
    return 0


def _line(prog: str, message: object) -> str:
    text = printable(" ".join(str(message).splitlines()))  # an argument may be as long as it likes
    return f"{prog}: error: {text if len(text) <= 1000 else f'{text[:700]} ... {text[-200:]}'}"


#: controls but tab and newline, marks of direction, lone surrogates: a terminal acts on them, or cannot show them
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")


def printable(text: str) -> str:
    r"""Return ``text`` with what a terminal would act on (names in a file may have it) as escapes, such as "\x1b"."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), text)


def write_whole(path: str | Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` fill a temporary file that ends as ``path`` does, and put that in place of ``path`` in one step.

    Readers see the old file or the new one. Raises ValueError, naming ``path``, where it cannot be written.
    """
    target = _file_at(path)
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".dsq-") as folder:
            temporary = Path(folder) / target.name
            write(temporary)
            if target.exists():
                shutil.copymode(target, temporary)
            os.replace(temporary, target)
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from None


def write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, by write_whole."""
    write_whole(path, lambda file: file.write_text(text, encoding="utf-8"))


def check_writable(path: str | Path) -> None:
    """Raise ValueError, before any work is done, where write_whole could not write to ``path``."""
    target = _file_at(path)
    if not target.parent.is_dir():
        raise ValueError(f"output {path} cannot be written: there is no folder {target.parent}")
    try:
        tempfile.TemporaryFile(dir=target.parent).close()
    except OSError as error:
        raise ValueError(f"output {path} cannot be written: {error.strerror}") from None


def _file_at(path: str | Path) -> Path:
    """Return what ``path`` leads to. Raises ValueError for a folder, a device and a FIFO."""
    target = Path(os.path.realpath(path))
    if target.is_dir():
        raise ValueError(f"output {path} is a folder: name a file")
    if Path(os.path.abspath(path)).is_relative_to("/dev") or (target.exists() and not target.is_file()):
        raise ValueError(f"output {path} cannot be written: it is no regular file; leave it out, and redirect with >")
    return target


Record = Mapping[str, Any]


def table(records: Sequence[Record], columns: Mapping[str, str] | None = None, markdown: bool = False) -> str:
    """Return ``records`` as text, a line each.

    ``columns``: the fields to show, in order, each with its format spec ("" as ``str`` writes it); without it, all
    fields of the first record. "-" stands for a field that is missing, None or NaN. Columns of text are aligned to the
    left, others to the right. ``markdown``: with the bars of a Markdown table.
    """
    from tabulate import tabulate  # not needed to parse a command line

    specs = dict.fromkeys(records[0] if records else (), "") if columns is None else columns
    examples = (next((r[name] for r in records if not is_missing(r.get(name))), None) for name in specs)
    text: str = tabulate(
        [[_cell(record.get(name), spec) for name, spec in specs.items()] for record in records],
        [name.replace("_", " ") for name in specs],
        tablefmt="pipe" if markdown else "simple",
        disable_numparse=True,
        colalign=["left" if isinstance(value, str) else "right" for value in examples] if records else None,
    )
    return text


def _cell(value: Any, spec: str) -> str:
    if is_missing(value):
        return "-"
    return value if isinstance(value, str) else format(value, spec)


def is_missing(value: Any) -> bool:
    """Return whether ``value`` is None or NaN."""
    return value is None or value != value  # only NaN differs from itself


def as_csv(records: Sequence[Record], spec: str = ".6g") -> str:
    """Return ``records`` as CSV with a head: every field that any of them has; empty where one lacks it, or it is None
    or NaN.

    ``spec``: the format of floats, "" for all their digits.
    """
    names = list(dict.fromkeys(name for record in records for name in record))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    for record in records:
        values = [record.get(name) for name in names]
        writer.writerow(["" if is_missing(v) else f"{v:{spec}}" if isinstance(v, float) else v for v in values])
    return text.getvalue()


@cache
def processor() -> str:
    """Return the CPU's name, family, model and stepping, as Linux gives them; elsewhere what Python knows."""
    try:
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
    except OSError:
        first = ""
    facts = dict(re.findall(r"^(.+?)\s*: (.*)$", first, re.MULTILINE))
    named = [facts[name] for name in ("model name", "cpu family", "model", "stepping") if name in facts]
    return " ".join(named) or platform.processor() or platform.machine()


MAX_BYTES = 64 * 2**20


def open_regular(path: str | Path, flags: int) -> int:
    """Return a descriptor of a regular file, opened with ``flags`` of os.open.

    Raises ValueError, without waiting for a writer, if it is a FIFO or a device; OSError if it cannot be opened.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise ValueError("cannot be read: accepted are regular files")


def read_bytes(path: str | Path, most: int) -> bytes:
    """Return the content of a regular file. Raises ValueError if it has more than ``most`` bytes, and as
    ``open_regular``."""
    with open(open_regular(path, os.O_RDONLY), "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ValueError(f"is larger than {most:,} bytes")
    return content


def read_text(path: str | Path, label: str = "") -> str:
    """Return the text of a regular file of at most MAX_BYTES, in UTF-8; errors name ``label``, or its path."""
    label = label or str(path)
    try:
        return read_bytes(path, MAX_BYTES).decode("utf-8")
    except OSError as error:
        raise ValueError(f"{label} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{label} is not text: {error.reason} at byte {error.start:,}") from None
    except ValueError as error:
        raise ValueError(f"{label} {error}") from None


#: of a line of a TOML file
MAX_DOTS = 1000


def read_json(path: str | Path, label: str = "") -> Any:
    """Return the data of a JSON file, of which Infinity and NaN may be part: Python writes them."""
    return _parsed(path, label, "JSON", json.loads)


def read_toml(path: str | Path, label: str = "") -> dict[str, Any]:
    """Return the data of a TOML file."""
    data: dict[str, Any] = _parsed(path, label, "TOML", _toml)
    return data


def _toml(text: str) -> dict[str, Any]:
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > MAX_DOTS:  # tomllib takes the square of a dotted key's parts: 14 seconds of 20,000
            raise ValueError(f"line {number:,} has more than {MAX_DOTS:,} dots")
    return tomllib.loads(text, parse_float=_finite)


def _parsed(path: str | Path, label: str, kind: str, parse: Callable[[str], Any]) -> Any:
    text, label = read_text(path, label=label), label or str(path)
    try:
        return parse(text)
    except RecursionError:
        raise ValueError(f"{label} is nested too deeply to be read") from None
    except ValueError as error:
        raise ValueError(f"{label} is not {kind}: {error}") from None


def _finite(text: str) -> float:
    number = float(text.replace("_", ""))
    if not math.isfinite(number):
        raise ValueError(f"numbers must be finite, got {text[:40]}")
    return number
