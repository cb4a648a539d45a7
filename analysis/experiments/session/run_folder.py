"""The folder of one run: its settings (run.json), its lock, how far it is and what came out."""

import contextlib
import fcntl
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from analysis.experiments.plan.experiment import Data
from analysis.experiments.plan.runs import PlannedRun
from analysis.experiments.session import data_folder
from analysis.experiments.training.results import write_json

_UPDATES = re.compile(r'"(?:valid_)?num_updates": "(\d+)"')
_EPOCHS = re.compile(r'"update": ([\d.]+)')


@dataclass(frozen=True)
class RunFolder:
    path: Path

    @property
    def log(self) -> Path:
        return self.path / "run.log"

    @property
    def results(self) -> dict[str, Any] | None:
        """What the run ended with; None before."""
        return _read(self.path / "results.json")

    @property
    def settings(self) -> dict[str, Any] | None:
        """What ``start`` recorded; None before."""
        return _read(self.path / "run.json")

    def check(self, run: PlannedRun, data: Data) -> None:
        """Raise ValueError where the folder holds a run with other settings than these."""
        found = self.settings
        if found is None:
            return
        wanted = {**_wanted(run), "data": data_folder.settings(data)}
        for key, value in wanted.items():
            if found[key] != value and not (key == "data" and data_folder.same(found[key], data)):
                raise ValueError(
                    f"{self.path}: its run was made with {key} {found[key]}, the recipe now says {value}: "
                    "give another --out, or remove that folder"
                )

    def start(self, run: PlannedRun, data: Data, place: dict[str, str]) -> None:
        """Record the run's settings and where it is started; a resumed run may have several places."""
        places = [*(self.settings or {}).get("places", []), place]
        self.path.mkdir(parents=True, exist_ok=True)
        write_json({**_wanted(run), "data": data_folder.settings(data), "places": places}, self.path / "run.json")

    @contextlib.contextmanager
    def locked(self) -> Iterator[int | None]:
        """The descriptor of the run's lock, for its process to hold until it ends; None where another process does."""
        self.path.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT)
        held = None
        try:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                held = descriptor
            yield held
        finally:
            os.close(descriptor)

    def done(self, run: PlannedRun) -> float:
        """The share of the training that is done, by its log."""
        if self.results:
            return 1.0
        with contextlib.suppress(FileNotFoundError), (self.path / "train.log").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 8192, 0))
            text = file.read().decode("utf-8", "replace")
            found = (_UPDATES if run.max_update else _EPOCHS).findall(text)
            whole = run.max_update or float(run.training.get("max-epoch", 0))
            return min(float(found[-1]) / whole, 1.0) if found and whole else 0.0
        return 0.0

    def failure(self, status: int) -> str:
        """Why a run ended with this exit status: a signal, which leaves no word, or the last line of its log."""
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        lines = self.log.read_text(encoding="utf-8", errors="replace").split("\n") if self.log.exists() else []
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")


def _wanted(run: PlannedRun) -> dict[str, Any]:
    """The settings that the run's numbers depend on."""
    return {key: value for key, value in asdict(run).items() if key in ("options", "seed", "training")}


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(FileNotFoundError):
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return content
    return None
