"""Runs dsq-preprocess, dsq-train and dsq-generate as processes of their own, and reads what they log."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from analysis import ROOT

POLL_SECONDS = 0.1
#: the last of a line: it may begin with one that a killed process did not finish
_RECORD = re.compile(r".*\| INFO \| (\w+) \| (\{.*\})$")
_LEVEL = re.compile(r"(DSQ level \d+ .*)$")


def environment() -> dict[str, str]:
    """The environment of a process that finds this checkout from any folder."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path}


def fairseq(command: str, arguments: list[str], log: Path, watch: Callable[[str], None] | None = None) -> None:
    """Run dsq-`command`; it adds all it prints to log, which is given to watch line by line.

    A training outlives a kill of this process alone: it goes on with its log, and with the run's lock.
    Raises ValueError with the command's own line where it found a mistake of the user's (exit status 2), and
    RuntimeError that names the log where it failed otherwise.
    """
    last = ""
    with (
        log.open("ab") as file,
        log.open(encoding="utf-8", errors="replace") as text,
        subprocess.Popen(
            [sys.executable, "-m", "fairseq_plugin.commands", command, *arguments],
            env=environment() | {"PYTHONUNBUFFERED": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
            close_fds=False,  # the lock
        ) as process,
    ):
        text.seek(file.tell())
        for line in _follow(process, text):
            last = line.strip() or last
            if watch:
                watch(line)
    if process.returncode == 2:
        raise ValueError(last)
    if process.returncode:
        raise RuntimeError(f"dsq-{command} failed with exit status {process.returncode}; its log is {log}")


def _follow(process: "subprocess.Popen[bytes]", text: IO[str]) -> Iterator[str]:
    """The lines that ``process`` adds to ``text`` until it ends."""
    line, ended = "", False
    while not ended:
        ended = process.poll() is not None  # what it wrote before is read below
        while part := text.readline():
            line += part
            if line.endswith("\n"):
                yield line.rstrip("\n")
                line = ""
        time.sleep(0 if ended else POLL_SECONDS)
    if line:
        yield line


def records(log: Path, kind: str) -> Iterator[dict[str, Any]]:
    """The JSON records that dsq-train --log-format json logged under this name (train_inner, train, valid)."""
    with log.open(encoding="utf-8") as file:
        for line in file:
            found = _RECORD.search(line)
            if found and found[1] == kind:
                yield json.loads(found[2])


def progress(line: str) -> str | None:
    """Return a line for a person if the line of the log tells of a validation or a change of level, else None."""
    found = _RECORD.search(line)
    if found and found[1] == "valid":
        record = json.loads(found[2])
        level = f"  level {record['valid_dsq_level']}" if "valid_dsq_level" in record else ""
        return f"  update {record['valid_num_updates']:>6}  valid loss {record['valid_loss']:>7}{level}"
    change = _LEVEL.search(line)
    return f"  {change[1]}" if change and "->" in change[1] else None


def show(line: str) -> None:
    """Print what ``progress`` finds in the line."""
    if shown := progress(line):
        print(shown, flush=True)


def hypotheses(log: Path) -> list[str]:
    """The translations of dsq-generate's output, in the order of the test text."""
    found: dict[int, str] = {}
    with log.open(encoding="utf-8") as file:
        for line in file:
            if line.startswith("D-"):
                number, _, text = line.rstrip("\n").split("\t")
                found[int(number[2:])] = text
    return [found[number] for number in sorted(found)]
