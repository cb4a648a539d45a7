"""The flags of dsq-train that a command gives, and what it leaves to the user."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dsq.command.parser import OneLineParser
from dsq.precision import DEFAULT_LEVELS, levels_text

LEVELS = levels_text(DEFAULT_LEVELS)
#: instead of levels: in floating point
FLOAT = "none"
#: what no command leaves to the user: it reads checkpoints where it had them put, and validations in the log
_OWN = "--save-dir --log-format --disable-validation"
_FIXED = "--no-epoch-checkpoints --no-progress-bar --log-format json"


def add_levels(parser: argparse.ArgumentParser, default: str = LEVELS) -> None:
    """--dsq-levels, as ``levels``."""
    text = f'precision schedule, or "{FLOAT}" (default: %(default)s)'
    parser.add_argument("--dsq-levels", dest="levels", default=default, help=text)


@dataclass(frozen=True)
class TrainingFlags:
    """Each as on a command line."""

    fixed: str  #: what the command relies on
    own: str  #: flags that are not the user's, because the command or the data decide
    defaults: str  #: given unless the user says otherwise

    def arguments(
        self, data: Path, save: Path, levels: str, users: Sequence[str], more: Sequence[str] = ()
    ) -> list[str]:
        """All that dsq-train is given; the user's flags come last, so that they override the defaults."""
        scheduled = [] if levels == FLOAT else ["--dsq-levels", levels]
        relied_on = [*self.fixed.split(), *_FIXED.split(), *more]
        return [str(data), "--save-dir", str(save), *relied_on, *self.defaults.split(), *scheduled, *users]

    def check(self, levels: str, users: Sequence[str]) -> None:
        """Raise ValueError, before anything is written, for flags that the command or dsq-train would not take."""
        taken = {word.partition("=")[0] for word in users}.intersection([*_OWN.split(), *self.own.split()])
        if taken:
            raise ValueError(f"{', '.join(sorted(taken))}: the recipe relies on its own choice here; leave out")
        from fairseq_plugin import commands  # takes seconds to import

        commands.check_training(self.arguments(Path(), Path("save"), levels, users))  # any directory is data to it

    def parser(self, prog: str, description: str | None) -> OneLineParser:
        """The command's parser, with what every such command takes."""
        top = OneLineParser(
            prog=prog,
            description=description,
            epilog="All other flags go to dsq-train (see there): model sizes, --lr, --max-update, --dsq-patience, ...\n"
            "Unless given, these: " + " ".join(self.defaults.split()),
        )
        folder = "new directory for all that the run writes"
        top.add_argument("--data", type=Path, required=True, metavar="DIR", help="directory of the text")
        top.add_argument("--out", type=Path, required=True, metavar="RUN", help=folder)
        top.add_argument("--vocab", type=int, default=4000, help="BPE subwords (default: %(default)s)")
        add_levels(top)
        top.add_argument("--resume", action="store_true", help="go on with the run in RUN from its last checkpoint")
        shared = "where runs share the binarised data (default: RUN)"
        top.add_argument("--prepared", type=Path, metavar="DIR", help=shared)
        return top
