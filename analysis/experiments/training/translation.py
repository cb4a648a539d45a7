"""What a run of analysis.experiments.translate is given, and where it keeps what."""

from dataclasses import dataclass
from pathlib import Path

from analysis.experiments.training.flags import LEVELS


@dataclass(frozen=True)
class Translation:
    data: Path
    out: Path
    source: str = "de"
    target: str = "en"
    prefix: str = ""
    columns: tuple[str, ...] = ("de", "en")
    lowercase: bool = False
    vocab: int = 4000
    beam: int = 4
    levels: str = LEVELS  #: "none": in floating point
    resume: bool = False
    prepared: Path | None = None  #: where the binarised data are, or are put for other runs too; None: in `out`
    training: tuple[str, ...] = ()  #: further flags for dsq-train, which come after TRAINING's

    @property
    def binary(self) -> Path:
        return (self.prepared or self.out) / "binary"

    @property
    def checkpoints(self) -> Path:
        return self.out / "checkpoints"

    def log(self, command: str) -> Path:
        return self.out / f"{command}.log"
