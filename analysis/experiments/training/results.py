"""What came out of a run of analysis.experiments.translate: results.json, and the table a person reads."""

import json
import os
from datetime import date
from pathlib import Path
from typing import Any

from sacrebleu.metrics.bleu import BLEU

from analysis.experiments.text.parallel_text import ParallelText
from analysis.experiments.training.fairseq_run import command_line, records
from analysis.experiments.training.flags import FLOAT
from analysis.experiments.training.translation import Translation
from costmodel.cli.commands import estimate
from costmodel.cli.main import parser
from dsq.command.files import write_text
from dsq.command.table import table


def collect(
    translation: Translation, text: dict[str, ParallelText], translations: list[str], seconds: dict[str, float]
) -> dict[str, Any]:
    """Everything measured in the run, as data for JSON."""
    references = text["test"].target
    assert len(translations) == len(references), "dsq-generate translates every sentence of the test text"
    bleu = BLEU()
    score = bleu.corpus_score(translations, [references])
    write_text(translation.out / f"hypotheses.{translation.target}", "\n".join(translations) + "\n")
    return {
        "date": date.today().isoformat(),
        "command": command_line(),
        "cpus": os.cpu_count(),
        "languages": f"{translation.source}-{translation.target}",
        "sentences": {split: len(part) for split, part in text.items()},
        "bleu": round(score.score, 2),
        "signature": str(bleu.get_signature()),
        **(_of_dsq(translation) if translation.levels != FLOAT else {}),
        "train_loss": losses(translation.log("train"), "train_inner", ""),
        "valid_loss": losses(translation.log("train"), "valid", "valid_"),
        "seconds": {stage: round(spent, 1) for stage, spent in {**seconds, "total": sum(seconds.values())}.items()},
    }


def losses(log: Path, kind: str, prefix: str) -> list[tuple[int, float]]:
    """Updates and losses of a training log. A resumed run logs some updates twice: the later line counts."""
    found = {int(one[f"{prefix}num_updates"]): float(one[f"{prefix}loss"]) for one in records(log, kind)}
    return sorted(found.items())


def _of_dsq(translation: Translation) -> dict[str, Any]:
    history = translation.checkpoints / "dsq_history.json"
    record = json.loads(history.read_text(encoding="utf-8"))
    return {"history": record, "costs": costs(history)}


def costs(history: Path) -> dict[str, dict[str, float]]:
    """profile -> arithmetic and dram of the run, relative to fixed-point 32: `dsq-cost estimate --history ...`."""
    found = {}
    for profile in ("first-principles", "paper"):
        given = parser().parse_args(["estimate", "--history", str(history), "--profile", profile])
        mean = estimate.run(given).sections[0].records[-1]
        found[profile] = {name: mean[name] for name in ("arithmetic", "dram")}
    return found


def write_json(results: dict[str, Any], path: Path) -> None:
    write_text(path, json.dumps(results, indent=1) + "\n")


def level_table(results: dict[str, Any]) -> str:
    """A row a level that was reached: its work, and a training step's stash where it was measured."""
    rows = []
    for level in results["history"]["levels"]:
        plain, packed = level.get("stash_bytes_fp32"), level.get("stash_bytes")
        row = {
            "level": str(level["precision"]).replace(" ", ""),
            "updates": level["updates"],
            "tokens": level["tokens"],
        }
        if plain:
            row |= {"stash fp32, KiB": plain / 1024, "stash DSQ, KiB": packed / 1024, "DSQ/fp32": packed / plain}
        rows += [row] if level["updates"] else []
    formats = {"level": "", "updates": ",", "tokens": ",", "stash fp32, KiB": ",.0f", "stash DSQ, KiB": ",.0f"}
    return table(rows, {**formats, "DSQ/fp32": ".3f"})


def summary(results: dict[str, Any]) -> str:
    """What a person reads at the end: BLEU and time; then for a DSQ run its levels and costs."""
    seconds = ", ".join(f"{stage} {spent:.0f} s" for stage, spent in results["seconds"].items())
    lines = [f"BLEU {results['bleu']:.1f}  ({results['signature']})", seconds]
    if "history" in results:
        relative = "relative to fixed-point 32, weighed by the tokens at each level (dsq-cost estimate):"
        lines += ["", level_table(results), "", relative]
        lines += [
            f"  {profile + ' profile:':26} arithmetic {cost['arithmetic']:.3f}x  DRAM {cost['dram']:.3f}x"
            for profile, cost in results["costs"].items()
        ]
    return "\n".join(lines)
