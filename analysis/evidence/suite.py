"""The suite as data: settings, tasks and tiers of suite.toml, and the runs that a tier asks for."""

import hashlib
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsq.command import read_toml
from dsq.formats import DEFAULT

SUITE = Path(__file__).with_name("suite.toml")
KINDS = ("translation", "language", "sentences", "finetuning", "images", "graph")
FP32 = "fp32"
#: kinds whose losses are nats a token; differences of the others' are relative
IN_NATS = ("translation", "language")
SEEDS = (1, 2, 3)


@dataclass(frozen=True)
class Setting:
    """How a model is trained: in fp32, under autocast, by dsq.DSQConfig, with stash policies."""

    name: str
    levels: str = ""  #: of DSQConfig; "": not converted
    stash: str = "all"  #: of DSQConfig
    rise_at: float | None = None  #: of DSQConfig
    format: str = DEFAULT  #: of DSQConfig
    rounding: str = "nearest"  #: of DSQConfig
    autocast: bool = False  #: PyTorch's own, to bfloat16
    #: options by policy, in the order in which they are applied: dsq.stash.policies(), or "packed_checkpoint"
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)  #: further fields of DSQConfig
    version: int = 1  #: of the code behind it

    @property
    def converting(self) -> dict[str, Any]:
        """The fields of DSQConfig besides its levels."""
        rises = {} if self.rise_at is None else {"rise_at": self.rise_at}
        return {"stash": self.stash, "format": self.format, "rounding": self.rounding, **self.options, **rises}


@dataclass(frozen=True)
class Task:
    """A training: its data, model, length and what it is scored by."""

    name: str
    kind: str  #: one of KINDS
    files: tuple[str, ...]  #: under a folder of --data
    get: str  #: where a person gets them
    updates: int
    rate: float  #: the highest learning rate
    batch: int = 0  #: tokens (translation), else samples of an update; 0: all
    dropout: float = 0.0
    source: str = "de"  #: language of a translation
    target: str = "en"  #: language of a translation
    flags: Mapping[str, Any] = field(default_factory=dict)  #: of a translation: dsq-train's, over problems.py's own
    config: Mapping[str, Any] = field(default_factory=dict)  #: of images, sentences: transformers' AutoConfig's
    sizes: Mapping[str, int] = field(default_factory=dict)  #: of the model and of the cut of the data


@dataclass(frozen=True)
class Tier:
    tasks: Sequence[str] = ()  #: none: all
    settings: Sequence[str] = ()  #: none: all
    noise: float | None = None  #: the first seed alone, where it differs from fp32's by more than this


@dataclass(frozen=True)
class Run:
    task: Task
    setting: Setting
    seed: int
    definition: str  #: a digest of what the suite says of the task and the setting
    noise: float | None = None  #: of its tier

    @property
    def key(self) -> tuple[str, str, int]:
        return self.task.name, self.setting.name, self.seed

    def __str__(self) -> str:
        return f"{self.task.name}, {self.setting.name}, seed {self.seed}"


@dataclass(frozen=True)
class Suite:
    path: Path
    tasks: Mapping[str, Task]
    settings: Mapping[str, Setting]
    tiers: tuple[Tier, ...]
    definitions: Mapping[tuple[str, str], str]  #: digests by task and setting

    def run(self, task: str, setting: str, seed: int, noise: float | None = None) -> Run:
        """Raises ValueError for a name that the suite has not."""
        for name, names in ((task, self.tasks), (setting, self.settings)):
            if name not in names:
                raise ValueError(f"{name}: the suite has no such name, but {', '.join(names)}")
        return Run(self.tasks[task], self.settings[setting], seed, self.definitions[task, setting], noise)

    def runs(self, tier: int) -> list[Run]:
        """The runs of the tiers 0 to ``tier``: all with one seed, then the next."""
        if not 0 <= tier < len(self.tiers):
            raise ValueError(f"--tier {tier}: accepted are 0 to {len(self.tiers) - 1}")
        runs: dict[tuple[str, str, int], Run] = {}
        for tier_settings in self.tiers[: tier + 1]:
            for key in itertools.product(
                tier_settings.tasks or self.tasks, tier_settings.settings or self.settings, SEEDS
            ):
                runs.setdefault(key, self.run(*key, tier_settings.noise))
        return sorted(runs.values(), key=lambda run: run.seed)


def load_suite(path: Path = SUITE) -> Suite:
    """Read a suite. Raises ValueError, which names the file, for what it cannot mean."""
    content = read_toml(path)
    try:
        tables = {kind: {table["name"]: table for table in content[kind]} for kind in ("tasks", "settings")}
        tasks = {name: Task(**{**table, "files": tuple(table["files"])}) for name, table in tables["tasks"].items()}
        settings = {name: Setting(**table) for name, table in tables["settings"].items()}
        tiers = tuple(Tier(**table) for table in content["tiers"])
        for task in tasks.values():
            if task.kind not in KINDS:
                raise ValueError(f"{task.name}: kind {task.kind!r} is none of {', '.join(KINDS)}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from None
    definitions = {
        (task, setting): _digest([tables["tasks"][task], tables["settings"][setting]])
        for task in tasks
        for setting in settings
    }
    return Suite(path, tasks, settings, tiers, definitions)


def locate(task: Task, roots: Sequence[Path]) -> list[Path]:
    """The task's files, each under the first of ``roots`` that has it. Raises ValueError where one is absent."""
    paths = []
    for name in task.files:
        path = next((root / name for root in roots if (root / name).exists()), None)
        if path is None:
            places = " or ".join(map(str, roots))
            raise ValueError(f"{name} is not under {places}. Get {task.get}")
        paths.append(path)
    return paths


def _digest(tables: list[dict[str, Any]]) -> str:
    decisive = [{key: value for key, value in table.items() if key not in ("get", "name")} for table in tables]
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:10]
